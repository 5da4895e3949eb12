"""Matches plans with jobs and profiles."""

from collections.abc import Sequence
from os.path import relpath
from pathlib import Path

from workbench.cost.device_names import shipped_device
from workbench.cost.model import CostModel
from workbench.cost.profile import Profile, known_profiles, load_profile
from workbench.job.job import Job
from workbench.plan.codec import planned_with
from workbench.plan.plan import Plan


def profile_for(plan: Plan) -> Profile:
    """The shipped profile of the cluster's kind of device; ValueError where there is none."""
    return _shipped(plan.cluster.nodes[0].device)


def cost_for(plan: Plan, given: Sequence[Profile] = ()) -> CostModel:
    """The cost model of a plan's machines: given profiles for their devices, shipped ones for all others.

    The first given profile is the main one, as a job's. Where all devices are of one kind and none of the
    others is of it, the first is used whatever its device.

    Raises:
        ValueError: some device has no shipped profile.
    """
    devices = list(dict.fromkeys(node.device for node in plan.cluster.nodes))
    main, *others = given or (_shipped(devices[0]),)
    profile_of = {profile.device: profile for profile in others if profile.device != main.device}
    if len(devices) > 1:
        unknown = (device for device in devices if device != main.device and device not in profile_of)
        profile_of |= {device: _shipped(device) for device in unknown}
    return CostModel(main, beside={device: CostModel(profile) for device, profile in profile_of.items()})


def named_profiles(job: Job, given: str | None, plan: Path) -> tuple[str, ...]:
    """The profiles that a plan file records for its job; paths are relative to the plan's folder.

    The job's or the given one, then those of pools with other devices, as the plan was priced.
    """
    names = [given or job.profile]
    if job.pools:
        main = load_profile(names[0]).device
        names += dict.fromkeys(pool.profile for pool in job.pools if pool.device != main)
    return tuple(_from_folder(name, plan.resolve().parent) for name in names)


def _from_folder(name: str, folder: Path) -> str:
    file = Path(name)
    return relpath(file.resolve(), folder) if file.is_file() else name


def cost_of_file(file: Path, plan: Plan, profile: str | None) -> CostModel:
    """The cost model of a plan file's machines, by the profiles that it was made with.

    Args:
        profile: replaces that of its device, and as the main one the first; None: none does.

    Raises:
        ValueError: as `profile_names_beside`, `load_profile` and `cost_for`.
    """
    if profile is None:
        return cost_for(plan, [load_profile(name) for name in profile_names_beside(file)])
    names = planned_with(file)
    others = [_located(file, name) for name in names if len(names) > 1 and not _is_gone(file, name)]
    return cost_for(plan, [load_profile(name) for name in (profile, *others)])


def profile_names_beside(plan: Path) -> tuple[str, ...]:
    """Names or paths of the profiles that a plan file was made with.

    A path counts from the plan's folder alone: a file of that name elsewhere, such as in the user's current
    folder, may be of another machine.

    Raises:
        ValueError: a file is missing, as where the plan was copied without it.
    """
    names = planned_with(plan)
    for name in names:
        if _is_gone(plan, name):
            raise ValueError(
                f"{plan}: the profile that it was made with, {name}, is not there; want --profile, or that "
                f"file at {(plan.parent / name).resolve()}"
            )
    return tuple(_located(plan, name) for name in names)


def _is_gone(plan: Path, name: str) -> bool:
    """Whether a plan file names a profile that is neither a file there nor shipped."""
    return not ((plan.parent / name).is_file() or _is_shipped(name))


def _is_shipped(name: str) -> bool:
    if "/" in name or name.endswith(".json"):
        return False
    try:
        return bool(shipped_device(name, known_profiles()))
    except ValueError:
        return False


def _located(plan: Path, name: str) -> str:
    file = plan.parent / name
    return str(file.resolve()) if file.is_file() else name


def profile_name_anywhere(name: str) -> str:
    """The name of a profile, its file by a path that holds in any folder; ValueError if it cannot be read."""
    load_profile(name)
    file = Path(name)
    return str(file.resolve()) if file.is_file() else name


def _shipped(device: str) -> Profile:
    if device in known_profiles():  # a shipped profile has the name of its device
        return load_profile(device)
    raise ValueError(
        f"no shipped profile is of device {device!r}: name one with --profile "
        f"(a file made by `workbench calibrate`, or one of {', '.join(known_profiles())})"
    )


def check_profile(profile: Profile, device: str) -> None:
    """Raise ValueError unless the profile is of that kind of device, as in `Node.device`."""
    if profile.device != device:
        raise ValueError(
            f"profile {profile.name!r} is of device {profile.device!r}, this runs on {device!r}: want a "
            "profile of the same device (`workbench calibrate` makes one)"
        )


def check_job(plan: Plan, job: Job, path: Path) -> None:
    """Raise ValueError unless the plan of a file is for this job's model, cluster and batch."""
    for what, ours, theirs in (
        ("model", plan.model, job.model),
        ("cluster", plan.cluster, job.cluster),
        ("batch", plan.batch, job.batch),
    ):
        if ours != theirs:
            raise ValueError(
                f"{path}: a plan for another {what} than job {job.name!r}: "
                f"{getattr(ours, 'name', 'other samples')} against {getattr(theirs, 'name', 'its samples')}"
            )
