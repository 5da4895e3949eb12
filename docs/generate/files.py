"""Reference of plan, profile, execution, trace and data files."""

from collections.abc import Collection

from docs.generate.markdown import code, page, table
from docs.generate.records import sections
from runtime.data.records import BOS, EOS, INDEX, PLACEHOLDER_TOKEN, VOCAB_SIZE
from workbench import trace_json
from workbench.cost.execution import Execution
from workbench.cost.profile import FORMAT_VERSION, Profile, known_profiles, load_profile
from workbench.data.corpora import CORPORA
from workbench.data.size_files import COLUMNS as SIZE_COLUMNS
from workbench.job.first_rows import UNLIKE
from workbench.llm_table.columns import ALIASES, COLUMNS, NOTE_PREFIXES, NOTES, OUTPUTS
from workbench.masks.patterns import PATTERNS, Pattern
from workbench.plan import codec
from workbench.plan.plan import Plan
from workbench.schedule.action import MEANING, SPELLINGS, STEP, Action, Number, Pass
from workbench.trace import Trace

PLAN = f"""A plan file is JSON with the keys `format` (`{codec.FORMAT}`), `schema_version`
({codec.SCHEMA_VERSION}), `hash` and `plan`. `workbench plan` writes it, and `workbench check` validates
it.

The hash is the SHA-256 of the plan's canonical JSON: sorted keys, no spaces, action names of version 1,
without `strategy`. It covers everything that determines the execution, and the cluster, but no costs and no
strategy name, so equal plans of two strategies have the same hash. A plan that was edited by hand no longer
matches its hash and is refused.

Unknown and missing keys are errors. An operator has the additional key `op`, its kind."""

ACTIONS = """Actions use the notation of `torch.distributed.pipelining`: `2F0` is the forward of
microbatch 0 on stage 2. For collectives of sharded parameters, the number counts rounds instead of
microbatches. The column "ranks" says which ranks run an action together:

- pass: all ranks of the stage, one pass after another
- fsdp: all ranks that shard the weights of the stage, concurrently with passes
- all-reduce: the ranks of each gradient group, concurrently with both
- step: each rank alone"""

VERSIONS = f"""The workbench writes version {codec.SCHEMA_VERSION} and reads all earlier versions.

- Version 1 had other names for some actions. If a name had two meanings, a number distinguished them.
- Up to version 2, the hash included the name of the strategy. Such a file must have that hash, and traces
  and checkpoints with that hash still belong to their plan. To compare a trace of version 2 with one of
  version 3, simulate the plan again."""

PROFILE = """A profile is a JSON file with measured or sourced facts about one machine.
`workbench calibrate` measures a machine and writes its profile, `workbench profile new` derives one from
a data sheet, and `workbench profile show` prints it. Rates are in FLOP/s and bytes/s, times in seconds."""

EXECUTION = """An execution file describes what a training system adds to a machine's profile: its
kernels, its host times and its rates. It is a JSON file for `--execution` with any of the keys below. All
keys have defaults, which leave the times of a profile unchanged."""

TRACE = f"""A trace file is Chrome trace JSON, which [Perfetto](https://ui.perfetto.dev) opens.
`simulate --trace`, `run --trace` and `ingest` write traces.

- A process is a rank, and a thread is a lane: compute, reduce, and one track for each overlapping
  message.
- Arrows connect both ends of a message, an all-gather of sharded weights with the pass that needs them,
  and a backward with the reduce-scatter of its gradients.
- Memory is a counter per rank, in simulated traces and in those of `run --watch-memory`.
- Timestamps are in microseconds for the viewer. `start_s` and `end_s` are the exact seconds.
- The records below are stored in `args` and in `otherData` (`format` `{trace_json.FORMAT}`,
  `schema_version` {trace_json.SCHEMA_VERSION}), from which the workbench reads a trace back."""

_SIZE_COLUMNS = ", ".join(code(column) for column in SIZE_COLUMNS)
_OUTPUTS = ", ".join(code(column) for column in OUTPUTS)
_NOTES = ", ".join(code(name) for name in (*NOTES, *(f"{prefix}..." for prefix in NOTE_PREFIXES)))
_ALIASES = "; ".join(f"{code(alias)}: {code(column)}" for alias, column in ALIASES.items())

FOLDER = f"""`plan --data FOLDER` and `run --data FOLDER` read a folder with training examples. Its file
`{INDEX}` has one example per line:

```json
{{"id": 0, "segments": [{{"image": "0.png"}}, {{"text": "a red square"}}]}}
```

| key | meaning |
| --- | --- |
| `id` | unique whole number |
| `segments` | list of `{{"text": TEXT}}`, `{{"image": FILE}}` and `{{"audio": FILE}}`; one text or more |
| `mask` | optional attention mask, see [Masks](#masks) |

Files are PNG and WAV inside the folder, with paths relative to it. An image is one item. It is resized to the
encoder's size, or, before an encoder of any size such as Qwen's, to what its processor makes of it;
for LLaVA-NeXT and LLaVA-OneVision it is cut into tiles. Text is tokenized as UTF-8 bytes,
tokens 0 to 255. Token {BOS} begins and {EOS} ends a sample, and {PLACEHOLDER_TOKEN} is the placeholder
for an image or clip. So the model's vocabulary must have at least {VOCAB_SIZE} tokens.
`python -m runtime.data.dataset make FOLDER` generates a small random folder."""

MASKS = """A mask is a name, or a call with parameters such as `sliding_window(window=4096)`. It is set by
`mask` in the `batch` of a job, in a line of a data folder, or in `Sample.mask` in Python. In a job it may
be a list that repeats over the samples.

Masks count the tokens of one sample. Samples never attend to each other. Parameters that divide a sample
take a list of token counts that add up to it, or a number of equal parts; the default is one part per
segment."""

SIZES = f"""`plan --sizes FILE` needs only the sizes of samples, not their content. FILE is a `.jsonl`,
`.csv` or `.parquet` file, or a folder written by `save_to_disk`. In a job file, use
`batch: {{samples: 512, sizes: FILE}}`. The batch is the first rows, so their order
should be random. A warning names a file whose first rows have {UNLIKE:g} times the tokens of its other rows
or more, or fewer by that factor, and unlike any batch drawn from it.

Trainers pack samples into rows of a number of tokens. `--pack 16384` with `--sizes`, or `pack_tokens: 16384`
in the batch, does so: every sample of the job is then a row of at most so many tokens, and the number of
samples of the data in a step varies. A sample goes to the fullest row of the step with room for it; the first
for which no row has room begins the next step. Packed samples do not attend to each other (mask
`causal_document`), and none is the target of another, so price and loss are those of each alone. A sample
longer than a row is refused, and so are other masks and models that read images by cross-attention. `plan`
says which share of the rows is empty, `simulate` the samples and tokens per second. Rows are as long as their
content: none is padded.

The columns are {_SIZE_COLUMNS}. `text_tokens` is required in every row. The others are a number, a list
or null. The first line of a `.csv` file names the columns; an empty cell is null, and a list is a quoted cell
such as `"[640, 32]"`. Further columns are ignored. Only `image`, `video` and `audio`, or their plurals, are
refused without columns of their sizes, as a plan would leave these items out. A warning names encoders for
which no sample of the batch has an item.

Conversation files, such as LLaVA's JSON lines, have text and image names instead of sizes. Compute the
sizes with the model's own tokenizer:

```text
text = " ".join(turn["value"] for turn in row["conversations"])
row["text_tokens"] = len(tokenizer(text)["input_ids"])
row["image_width"], row["image_height"] = PIL.Image.open(row["image"]).size
```

`--sizes` and `sizes` also take the name of a corpus:"""

TRACES_OF_NODES = """`workbench failures --trace` and `workbench elastic --trace` read a CSV file of nodes
that join and leave. The columns are `t_s` (seconds, ascending), `event` (`add` or `remove`) and `node` (a
name). A node that returns has a new name. `examples/elastic-spot.csv` is an example."""


def plan_page() -> str:
    """The page on plan files."""
    headers = ("action", "what it does", "kind of work", "ranks", "in version 1")
    return page(
        "Plan file",
        PLAN,
        sections(Plan),
        "## Actions",
        ACTIONS,
        table(headers, map(_action_row, MEANING)),
        "## Versions",
        VERSIONS,
    )


def _action_row(kind: Pass) -> tuple[str, ...]:
    meaning = MEANING[kind]
    number = None if meaning.number is Number.NOTHING else 0
    action = STEP if kind is Pass.STEP else Action(2, kind, number)
    then = SPELLINGS[1].write(action)
    made_of = f"{meaning.activity}, {meaning.operation}" if meaning.operation else meaning.activity
    return code(action), meaning.about, made_of, meaning.task, code(then)


def profile_page() -> str:
    """The page on profiles and executions."""
    shipped = _shipped()
    common = [cost for cost in shipped[0].unmeasured if all(cost in each.unmeasured for each in shipped)]
    rows = [
        (code(each.name), each.device, each.provenance.date, *_unmeasured(each, common)) for each in shipped
    ]
    return page(
        "Profile and execution files",
        f"{PROFILE} The format version is {FORMAT_VERSION}.",
        "## Shipped profiles",
        "No shipped profile has measurements of these costs:",
        "\n".join(f"- {cost}" for cost in common),
        table(("profile", "device", "date", "scaled by data sheets", "also not measured"), rows),
        sections(Profile),
        EXECUTION,
        sections(Execution),
    )


def _unmeasured(profile: Profile, common: Collection[str]) -> tuple[str, str]:
    """What is scaled from the profile that it is like, and other costs that nobody measured."""
    scaled = f": {profile.like} scaled by data sheets"
    costs = [cost for cost in profile.unmeasured if cost not in common]
    kinds = ", ".join(cost.removesuffix(scaled) for cost in costs if cost.endswith(scaled))
    others = "; ".join(cost for cost in costs if not cost.endswith(scaled))
    return f"from {profile.like}: {kinds}" if kinds else "", others


def trace_page() -> str:
    """The page on traces."""
    return page("Trace file", TRACE, sections(Trace))


def data_page() -> str:
    """The page on what users bring and get in tables and folders."""
    corpora = [(code(corpus.name), corpus.measured, corpus.assumed) for corpus in CORPORA]
    columns = [(code(c.name), c.about, "required" if c.default is None else c.shown) for c in COLUMNS]
    return page(
        "Data files",
        "## Data folder",
        FOLDER,
        "## Masks",
        MASKS,
        table(("mask", "parameters", "a token attends to"), [_mask_row(*each) for each in PATTERNS.items()]),
        "## Sizes",
        SIZES,
        table(("corpus", "measured", "assumed"), corpora),
        "## Table of language models",
        f"`workbench predict` reads a CSV file with these columns. It adds the columns {_OUTPUTS}.",
        table(("column", "meaning", "default"), columns),
        f"These names are synonyms: {_ALIASES}.",
        f"Columns named {_NOTES} are copied to the output. Any other heading is an error.",
        "## Trace of nodes",
        TRACES_OF_NODES,
    )


def _mask_row(name: str, pattern: Pattern) -> tuple[str, ...]:
    wanted = [f"{code(key)}: {kind.words}" for key, kind in pattern.wanted.items()]
    optional = [f"{code(key)}, optional: {kind.words}" for key, kind in pattern.optional.items()]
    return code(name), "; ".join(wanted + optional), pattern.about


def _shipped() -> list[Profile]:
    return [load_profile(name) for name in known_profiles()]
