// A trace file as columns: the page carries the file itself, compressed, and reads it when a plan is opened.

const ACTION = /^(\d+)?([A-Z_]+)(\d+)?$/;

// The bytes of a gzipped base64 text.
export async function unpacked(base64) {
  const packed = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

// Spans are numbered as in the file; `ofRank` has those of a rank's lanes by their start.
export function columnsOf(buffer, laneNames) {
  const events = JSON.parse(new TextDecoder().decode(buffer)).traceEvents;
  const spans = [], messages = [], ofRank = new Map();
  const place = rank => {
    if (!ofRank.has(rank)) ofRank.set(rank, { compute: [], reduce: [], send: [], memory: { time: [], bytes: [] } });
    return ofRank.get(rank);
  };
  for (const event of events) {
    if (event.ph === "X" && event.args.action !== undefined) {
      const lane = laneNames[event.tid];
      place(event.pid)[lane].push(spans.length);
      spans.push(spanOf(event, lane));
    } else if (event.ph === "X" && event.cat === "send") {
      place(event.pid).send.push(messages.length);
      messages.push(event.args);
    } else if (event.ph === "C") {
      const memory = place(event.pid).memory;
      memory.time.push(event.time_s);
      memory.bytes.push(event.args.bytes);
    }
  }
  for (const lanes of ofRank.values()) {
    for (const lane of ["compute", "reduce"]) lanes[lane].sort((a, b) => spans[a].start - spans[b].start);
    lanes.send.sort((a, b) => messages[a].start_s - messages[b].start_s);
  }
  const end = [...spans.map(span => span.end), ...messages.map(message => message.end_s)].reduce((a, b) => Math.max(a, b), 0);
  return { spans, messages, ofRank, end };
}

function spanOf(event, lane) {
  const [, stage, kind, number] = ACTION.exec(event.args.action);
  return {
    rank: event.pid,
    lane,
    name: event.args.action,
    kind,
    stage: stage === undefined ? null : Number(stage),
    number: number === undefined ? null : Number(number),
    start: event.args.start_s,
    end: event.args.end_s,
  };
}

// The first place in an ascending list of numbers whose item ends after a time; lanes do not overlap themselves.
export function firstAfter(order, endOf, time) {
  let low = 0, high = order.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (endOf(order[middle]) < time) low = middle + 1;
    else high = middle;
  }
  return low;
}

// What a rank holds at a time; null before its first sample.
export function heldAt(memory, time) {
  let low = 0, high = memory.time.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (memory.time[middle] <= time) low = middle + 1;
    else high = middle;
  }
  return low ? memory.bytes[low - 1] : null;
}
