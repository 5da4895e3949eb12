"""Matches plans with jobs and profiles."""

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


def cost_for(plan: Plan, given: Profile | None = None) -> CostModel:
    """The cost model of a plan's machines: shipped profiles of its devices, or the given one for its own.

    Where all devices are of one kind, the given profile is used whatever its device.

    Raises:
        ValueError: some device has no shipped profile.
    """
    devices = list(dict.fromkeys(node.device for node in plan.cluster.nodes))
    if len(devices) == 1:
        return CostModel(given or _shipped(devices[0]))
    profile_of = {device: _shipped(device) for device in devices if given is None or device != given.device}
    main = given or profile_of[devices[0]]
    return CostModel(main, beside={device: CostModel(profile) for device, profile in profile_of.items()})


def named_profile(job: Job, given: str | None, plan: Path) -> str | None:
    """The profile that a plan file records for its job; paths are relative to the plan's folder.

    None where the job's pools have several.
    """
    name = given or job.profile
    if job.pools and given is None:
        return None
    file = Path(name)
    return relpath(file.resolve(), plan.resolve().parent) if file.is_file() else name


def cost_of_file(file: Path, plan: Plan, profile: str | None) -> CostModel:
    """The cost model of a plan file's machines, by a named profile or the one that it was made with.

    Raises:
        ValueError: as `profile_beside` and `cost_for`.
    """
    return cost_for(plan, profile_beside(file) if profile is None else load_profile(profile))


def profile_beside(plan: Path) -> Profile | None:
    """The profile that a plan file was made with; None where it records none.

    Raises:
        ValueError: the profile's file is missing or invalid.
    """
    name = profile_name_beside(plan)
    return None if name is None else load_profile(name)


def profile_name_beside(plan: Path) -> str | None:
    """Name or path of the profile that a plan file was made with.

    A path counts from the plan's folder alone: a file of that name elsewhere, such as in the user's current
    folder, may be of another machine.

    Raises:
        ValueError: its file is missing, as where the plan was copied without it.
    """
    name = planned_with(plan)
    if name is None:
        return None
    file = plan.parent / name
    if file.is_file():
        return str(file.resolve())
    if not _is_shipped(name):
        raise ValueError(
            f"{plan}: the profile that it was made with, {name}, is not there; want --profile, or that "
            f"file at {file.resolve()}"
        )
    return name


def _is_shipped(name: str) -> bool:
    if "/" in name or name.endswith(".json"):
        return False
    try:
        return bool(shipped_device(name, known_profiles()))
    except ValueError:
        return False


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
