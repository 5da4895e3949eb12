"""Reference of plan, profile, execution, trace and data files."""

from docs.generate.markdown import code, page, table
from docs.generate.records import sections
from runtime.data.records import BOS, EOS, INDEX, PLACEHOLDER_TOKEN, VOCAB_SIZE
from workbench import trace_json
from workbench.cost.execution import Execution
from workbench.cost.profile import FORMAT_VERSION, Profile, known_profiles, load_profile
from workbench.data.corpora import CORPORA
from workbench.data.size_files import COLUMNS as SIZE_COLUMNS
from workbench.llm_table.columns import ALIASES, COLUMNS, NOTE_PREFIXES, NOTES, OUTPUTS
from workbench.masks.patterns import PATTERNS, Pattern
from workbench.plan import codec
from workbench.plan.plan import Plan
from workbench.schedule.action import MEANING, SPELLINGS, STEP, Action, Number, Pass
from workbench.trace import Trace

PLAN = f"""A plan file is JSON with the keys `format` (`{codec.FORMAT}`), `schema_version`
({codec.SCHEMA_VERSION}), `hash` and `plan`. The hash is SHA-256 of the plan's canonical JSON (keys sorted,
no spaces, actions by their names of version 1, without `strategy`): whoever edits a plan by hand gets a
corrupt file. It covers all that decides the execution, no cost and no name: equal plans of two strategies
have one hash. Unknown and missing keys are errors. An operator also has the
key `op`, the name of its kind."""

ACTIONS = """An action is written in torch's letters: `2F0` is the forward of microbatch 0 on stage 2.
Of a stage whose parameters are sharded, the number behind a name is the round's. Who does an action
together, beside what else: pass, all ranks of the stage, one after another; fsdp, all ranks that shard its
weights, beside their passes; all-reduce, the ranks of each gradient group, beside both; step, each rank."""

VERSIONS = f"""Files of version {codec.SCHEMA_VERSION} are written; those of earlier versions are read.
In version 1 a few actions had other names; where one had two meanings, a number told them apart. Until
version 2 a plan's hash was over the strategy's name as well: such a file must have that hash, and a trace or
checkpoint that has it still belongs to its plan. To compare a trace of version 2 with one of version 3,
simulate the plan again."""

PROFILE = """A profile holds what is known about one machine, as JSON, row by row with its source.
`workbench calibrate` writes one. Rates are FLOP/s and bytes/s, times are seconds."""

EXECUTION = """An execution is what a training system does beyond what a machine's tables say: its kernels,
its host, its rates. It is a JSON file of any of these keys, for `--execution`; the default of every key
leaves a profile's times as they are."""

TRACE = f"""A trace file is Chrome JSON that Perfetto opens; what the workbench reads back stands in `args`
and in `otherData` (`format` `{trace_json.FORMAT}`, `schema_version` {trace_json.SCHEMA_VERSION}).
Timestamps are microseconds for the viewer; the exact seconds stand beside them as `start_s` and `end_s`. A
process is a rank and a thread a lane: compute, reduce, and as many tracks of messages as overlap. Arrows join
a message's two ends, an all-gather of sharded weights to the pass that needs them, and a backward to the
reduce-scatter of its gradients; memory is a counter of each rank, in simulated traces and in those of
`run --watch-memory`."""

_SIZE_COLUMNS = ", ".join(code(column) for column in SIZE_COLUMNS)
_OUTPUTS = ", ".join(code(column) for column in OUTPUTS)
_NOTES = ", ".join(code(name) for name in (*NOTES, *(f"{prefix}..." for prefix in NOTE_PREFIXES)))
_ALIASES = "; ".join(f"{code(alias)}: {code(column)}" for alias, column in ALIASES.items())

FOLDER = f"""`plan --data FOLDER` and `run --data FOLDER` read a folder with `{INDEX}`: one example a line,
with the keys `id` (whole number, once), `segments` (a list in sequence order of `{{"text": TEXT}}`,
`{{"image": FILE}}` and `{{"audio": FILE}}`, at least one text) and, at will, `mask` (see [Masks](#masks)).
Files are PNG and WAV, inside the folder and named relative to it. Texts are read as their UTF-8 bytes:
tokens 0 to 255, {BOS} begins and {EOS} ends a sample, {PLACEHOLDER_TOKEN} stands for an image or a
clip, so the model's vocabulary has at least {VOCAB_SIZE}. An image takes the encoder's own size; before a
tower of LLaVA-NeXT or LLaVA-OneVision it is cut into tiles by its own.
`python -m runtime.data.dataset make FOLDER` draws a small one."""

MASKS = """`mask` of a job's `batch`, of a line of a data folder and of `Sample.mask` in Python is a name, or
a call with its parameters: `sliding_window(window=4096)`. In a job it may be a list that goes round the
samples. All count tokens of one sample; samples never see each other. Parts are a list of token counts that
add up to the sample, a number of equal parts, or, left out, one for each segment."""

SIZES = f"""`plan --sizes FILE` takes sizes alone: a `.jsonl` or `.parquet` file, or a folder of
`save_to_disk`. Columns are {_SIZE_COLUMNS}; `text_tokens` stands in every row, the others are a number, a
list or null. Other columns are left alone. `batch: {{samples: 512, sizes: FILE}}` says the
same in a job file.

Conversations, such as LLaVA's JSON lines, hold text and names of images, not their sizes; three lines count
them with the model's own tokenizer:

```text
text = " ".join(turn["value"] for turn in row["conversations"])
row["text_tokens"] = len(tokenizer(text)["input_ids"])
row["image_width"], row["image_height"] = PIL.Image.open(row["image"]).size
```

`--sizes` and `sizes` also take a corpus by name:"""

TRACES_OF_NODES = """`workbench failures --trace` and `workbench elastic --trace` read a CSV file with the
columns `t_s` (seconds, ascending), `event` (`add` or `remove`) and `node` (a name). A node that comes back
has a new name. `examples/elastic-spot.csv` is one."""


def plan_page() -> str:
    """The page on plan files."""
    headers = ("action", "what it does", "made of", "who", "in version 1")
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
    shipped = [(code(p.name), p.device, p.provenance.date, "; ".join(p.unmeasured)) for p in _shipped()]
    return page(
        "Profile and execution files",
        f"{PROFILE} The format's version is {FORMAT_VERSION}. These ship:",
        table(("profile", "device", "date", "not measured"), shipped),
        sections(Profile),
        EXECUTION,
        sections(Execution),
    )


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
        table(("mask", "parameters", "a token sees"), [_mask_row(*each) for each in PATTERNS.items()]),
        "## Sizes",
        SIZES,
        table(("corpus", "measured", "assumed"), corpora),
        "## Table of language models",
        f"`workbench predict` reads a CSV file with these columns and adds {_OUTPUTS}.",
        table(("column", "meaning", "default"), columns),
        f"Other names of the field mean the same: {_ALIASES}.",
        f"Carried along and not read are {_NOTES}; any other heading is an error.",
        "## Trace of nodes",
        TRACES_OF_NODES,
    )


def _mask_row(name: str, pattern: Pattern) -> tuple[str, ...]:
    wanted = [f"{code(key)}: {kind.words}" for key, kind in pattern.wanted.items()]
    optional = [f"{code(key)}, at will: {kind.words}" for key, kind in pattern.optional.items()]
    return code(name), "; ".join(wanted + optional), pattern.says


def _shipped() -> list[Profile]:
    return [load_profile(name) for name in known_profiles()]
