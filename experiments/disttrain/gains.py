"""Gains over Megatron-LM and DistMM*, compared with the prose, which gives ranges and no table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache

from experiments.disttrain.systems import (
    MODELS,
    PROFILE,
    Images,
    Result,
    Systems,
    Trained,
    Workload,
    plausible_images,
)
from experiments.harness.causes import open_cause
from experiments.harness.outcome import Evidence, PaperNumber
from experiments.harness.printed import PrintedRow, claim_value, printed_rows

IMAGES = "images in a sample of 8,192 tokens, the size of those read, and how they are batched"
STOPPING = f"when DistTrain stops adding GPUs; {IMAGES}"
FORGONE = (0.01, 0.05)  # of a throughput, for which somebody would take fewer GPUs
REL_TOL = 0.05  # of a gain printed with two digits
SMALL = ("MLLM-9B", "MLLM-15B")

ByImages = Mapping[str, float]  # by the names of plausible images, the nominal first
Gains = Mapping[str, ByImages]  # key -> gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """One experiment of the paper: the systems' results by model.

    Args:
        name: as in the table of the prose.
        budget: most GPUs of DistTrain and DistMM*.
        trained: which modules are trained.
    """

    name: str
    budget: int
    trained: Trained = Trained.ALL

    def printed(self, system: str, model: str) -> PrintedRow:
        """The prose's row of a system; ValueError when it has none."""
        for row in printed_rows("disttrain_prose_gpus"):
            if (row["experiment"], row["system"], row["model"]) == (self.name, system, model):
                return row
        raise ValueError(f"{self.name}: nothing is printed of {system} and {model}")

    def results(self, model: str, images: Images) -> dict[str, Result]:
        """DistTrain, DistMM* and Megatron-LM on one model."""
        return _results(self, model, images)

    def ratio(self, model: str, rival: str, quantity: Callable[[Result], float]) -> ByImages:
        """DistTrain's quantity over a rival's, by plausible images."""
        return self.by_images(
            model, lambda results: quantity(results["disttrain"]) / quantity(results[rival])
        )

    def by_images(self, model: str, of_results: Callable[[Mapping[str, Result]], float]) -> ByImages:
        """A number computed from all systems' results, by plausible images."""
        return {
            name: of_results(self.results(model, images)) for name, images in plausible_images(model).items()
        }

    def add_gpus(self, evidence: Evidence, systems: Mapping[str, str]) -> None:
        """Add the GPUs taken, beside the printed counts; `systems` maps the prose's names to ours."""
        for printed, ours in systems.items():
            for model in MODELS:
                row = self.printed(printed, model)
                counts = self._num_gpus(model, ours)
                if ours == "disttrain":
                    counts |= self._fewer_gpus(model)
                number = PaperNumber(
                    f"modelled/GPUs of {printed}, {model}", float(row["n_gpus"]), "GPUs", "prose", REL_TOL
                )
                evidence.add_range(number, counts, STOPPING if ours == "disttrain" else IMAGES)

    def _num_gpus(self, model: str, system: str) -> dict[str, float]:
        return dict(self.by_images(model, lambda results: float(results[system].num_gpus)))

    def _fewer_gpus(self, model: str) -> dict[str, float]:
        """DistTrain's GPUs by the throughput given up for fewer of them, with the nominal images."""
        images, *_ = plausible_images(model).values()
        batch = int(self.printed("disttrain", model)["global_batch_samples"])
        systems = self.systems_on(model, images)
        return {
            f"for {100 * forgone:.0f} % of the time": float(
                systems.frugal(self.budget, batch, forgone).num_gpus
            )
            for forgone in FORGONE
        }

    def add_order(self, evidence: Evidence) -> None:
        """Add claims that DistTrain is ahead of DistMM*, and that of Megatron-LM, in MFU and throughput."""
        for model in MODELS:
            results_of_images = [self.results(model, images) for images in plausible_images(model).values()]
            for name, quantity in (("MFU", mfu), ("throughput", throughput)):
                ahead = sum(
                    quantity(results["disttrain"])
                    >= quantity(results["distmm"])
                    >= quantity(results["megatron"])
                    for results in results_of_images
                )
                evidence.claim(
                    f"{name}, {model}: DistTrain, DistMM*, Megatron-LM in this order in {ahead} of "
                    f"{len(results_of_images)}",
                    ahead == len(results_of_images),
                    cause=self._why_out_of_order(model, quantity),
                )

    def _why_out_of_order(self, model: str, quantity: Callable[[Result], float]) -> str:
        """How often each is behind the next, and the rates of modules that shares of FLOP ignore."""
        least, most = (self.ratio(model, rival, quantity) for rival in ("distmm", "megatron"))
        first = sum(ratio < 1 for ratio in least.values())
        second = sum(least[name] > most[name] for name in least)
        return (
            "open, with the images: DistTrain, which takes the shortest iteration, is behind DistMM* in "
            f"{first} ({min(least.values()):.2f} times at the least), DistMM* behind Megatron-LM in "
            f"{second}; its shares of FLOP ignore that {self._rates(model)}"
        )

    def idle_cause(self, model: str, rival: str) -> str:
        """Why a gain is what it is, with the nominal images: balance alone, or shares of FLOP."""
        if rival == "distmm":
            return f"DistMM*'s shares of FLOP ignore that {self._rates(model)}"
        images, *_ = plausible_images(model).values()
        llm_pp = _llm_pp(model)
        first, middle, last = (
            stage.total_s for stage in self.systems_on(model, images).monolithic_stages(llm_pp)
        )
        longest = max(first, middle, last)
        balance = (llm_pp + 2) * longest / (first + llm_pp * middle + last)
        return (
            f"Megatron-LM's encoder and generator are busy for {first / longest:.0%} and "
            f"{last / longest:.0%} of its longest stage, of {llm_pp + 2}: even ones would gain "
            f"{balance:.2f}; besides, DistTrain overlaps collectives and has its own degrees for each module"
        )

    def _rates(self, model: str) -> str:
        images, *_ = plausible_images(model).values()
        rates = self.systems_on(model, images).module_mfu()
        return f"{model}'s modules reach of the peak by our cost model: " + ", ".join(
            f"{name} {rate:.0%}" for name, rate in rates.items()
        )

    def note_results(self, evidence: Evidence) -> None:
        """Note absolute values of the nominal setting, which the paper shows only as bars."""
        for model in MODELS:
            images, *_ = plausible_images(model).values()
            for system, result in self.results(model, images).items():
                evidence.ours[f"modelled/MFU of {system}, {model}"] = result.mfu
                evidence.ours[f"modelled/samples a second of {system}, {model}"] = result.samples_per_s
        evidence.notes.append(
            f"profile {PROFILE}, data sheet links; MFU: FLOP of forward and the gradients that run, "
            "attention by its causal pairs, over GPUs x 312 TFLOP/s x iteration; microbatch of one sample; "
            "every sample alike"
        )

    def note_causes(self, evidence: Evidence) -> None:
        """Note Megatron-LM's stages and the gain of DistTrain's last GPUs, in the nominal setting."""
        for model in MODELS:
            images, *_ = plausible_images(model).values()
            systems = self.systems_on(model, images)
            stages = [stage.total_s for stage in systems.monolithic_stages(_llm_pp(model))]
            shares = ", ".join(
                f"{name} {seconds:.3f} s ({seconds / max(stages):.0%} busy)"
                for name, seconds in zip(("encoder", "LLM stage", "generator"), stages, strict=True)
            )
            row = self.printed("disttrain", model)
            best = self.results(model, images)["disttrain"]
            fewer = systems.disttrain(int(row["n_gpus"]), int(row["global_batch_samples"]))
            evidence.ours[f"modelled/{model}/iteration at the printed GPUs over ours"] = (
                fewer.iteration_s / best.iteration_s
            )
            slower = fewer.iteration_s / best.iteration_s
            evidence.notes.append(
                f"cause, {model}: Megatron-LM's {shares}: encoder and generator have as many GPUs as each of "
                f"the LLM's {_llm_pp(model)} stages; DistTrain on the printed {row['n_gpus']} GPUs instead "
                f"of our {best.num_gpus} takes {slower:.3f} times as long: more GPUs do bring something here"
            )

    def note_rates(self, evidence: Evidence, model: str, pattern: str) -> None:
        """Note why rows that depend on small modules are off: their share of a GPU's peak."""
        evidence.causes[pattern] = self._rates(model)

    def systems_on(self, model: str, images: Images) -> Systems:
        return Systems(Workload(model=model, images=images, trained=self.trained))


@cache
def _results(experiment: Experiment, model: str, images: Images) -> dict[str, Result]:
    systems = experiment.systems_on(model, images)
    monolithic = experiment.printed("megatron_lm", model)
    batch = int(monolithic["global_batch_samples"])
    llm_pp = _llm_pp(model)
    return {
        "disttrain": systems.disttrain(experiment.budget, batch),
        "distmm": systems.by_flop(experiment.budget, batch),
        "megatron": systems.monolithic(int(monolithic["n_gpus"]), batch, llm_pp),
    }


def _llm_pp(model: str) -> int:
    """Pipeline stages of Megatron-LM's LLM."""
    return next(int(row["llm_pp"]) for row in printed_rows("disttrain_prose_gpus") if _states_pp(row, model))


def _states_pp(row: PrintedRow, model: str) -> bool:
    return row["system"] == "megatron_lm" and row["model"] == model and row["llm_pp"] != ""


def mfu(result: Result) -> float:
    return result.mfu


def throughput(result: Result) -> float:
    return result.samples_per_s


def add_range(evidence: Evidence, claim: str, where: str, gains: Gains) -> None:
    """Add two rows: smallest and largest gain of several cases against the ends of a printed range."""
    for end, pick in (("low", min), ("high", max)):
        value_of = {name: pick(values) for name, values in _together(gains).items()}
        number = PaperNumber(f"modelled/{claim} {end}", claim_value(f"{claim}_{end}"), "x", where, REL_TOL)
        evidence.add_range(number, value_of, IMAGES)


def add_exact(evidence: Evidence, claim: str, where: str, gains: ByImages, unit: str = "x") -> None:
    """Add one row of one printed number."""
    number = PaperNumber(f"modelled/{claim}", claim_value(claim), unit, where, REL_TOL)
    evidence.add_range(number, gains, IMAGES)


def add_inside(
    evidence: Evidence, quantity: str, claim: str, gains: Gains, causes: Mapping[str, str]
) -> None:
    """Add per case whether the nominal gain is in the printed range; `causes` say why it is what it is."""
    low, high = claim_value(f"{claim}_low"), claim_value(f"{claim}_high")

    def is_inside(gain: float) -> bool:
        return low * (1 - REL_TOL) <= gain <= high * (1 + REL_TOL)

    for key, of_images in gains.items():
        nominal, *_ = values = tuple(of_images.values())
        evidence.ours[f"modelled/{claim} of {key}"] = nominal
        evidence.claim(
            f"{quantity}, {key}: {nominal:.2f} (over the plausible images {min(values):.2f} to "
            f"{max(values):.2f}) lies in the printed {low:g} to {high:g}",
            is_inside(nominal),
            cause=f"{causes[key]}. Of the gains, {open_cause(of_images, is_inside, IMAGES)}",
        )


def _together(gains: Gains) -> dict[str, list[float]]:
    """Gains of all cases by name of images; a case without these images has its nominal gain."""
    names = dict.fromkeys(name for of_images in gains.values() for name in of_images)
    return {
        name: [of_images.get(name, next(iter(of_images.values()))) for of_images in gains.values()]
        for name in names
    }
