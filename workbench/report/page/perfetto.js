// Hands a trace to Perfetto's own page, which reads it in the browser: nothing is sent to a server.

const PERFETTO = "https://ui.perfetto.dev";
const ASK_MS = 100, GIVE_UP_MS = 30_000;

// Perfetto answers PONG as soon as it listens (perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui).
// The window opens at once, in the click; the trace may come later.
export function openInPerfetto(buffer, title, say) {
  const opened = window.open(PERFETTO);
  if (!opened) return say("The browser did not open a window. Download the trace and open it at ui.perfetto.dev.");
  say("Waiting for ui.perfetto.dev …");
  const asking = setInterval(() => opened.postMessage("PING", PERFETTO), ASK_MS);
  const stop = text => {
    clearInterval(asking);
    clearTimeout(late);
    removeEventListener("message", listen);
    say(text);
  };
  const late = setTimeout(
    () => stop("ui.perfetto.dev does not answer: download the trace and drop it there once it can be reached."),
    GIVE_UP_MS,
  );
  const listen = async event => {
    if (event.source !== opened || event.origin !== PERFETTO || event.data !== "PONG") return;
    stop("Opened in Perfetto.");
    opened.postMessage({ perfetto: { buffer: await buffer, title } }, PERFETTO);
  };
  addEventListener("message", listen);
}

export async function download(buffer, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await buffer], { type: "application/json" }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
