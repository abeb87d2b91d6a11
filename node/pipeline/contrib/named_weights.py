"""Backward passes that name the weights of their forward passes, for pipelines that keep versions
of them (node/pipeline/server/weight_versions.py, decision 016). Behind the seam `PassWeights` of
node/pipeline/trainer/in_flight.py."""

from dataclasses import dataclass, field

from farflock.node.pipeline.passes.requests import Version
from farflock.node.run.terms import WhenGone


@dataclass(slots=True)
class NamedWeights:
    """The versions that one microbatch met on its way. `gone` says what becomes of it where no
    server has one of them any more: it is dropped, or differentiated at the newest weights."""

    gone: WhenGone = "drop"
    _versions: dict[int, Version] = field(default_factory=dict)

    def used(self, stage: int, version: Version | None) -> None:
        """Name this one from now on, if it is one."""
        if version is not None:
            self._versions[stage] = version

    def named(self, stage: int) -> Version | None:
        """That of the stage's last pass."""
        return self._versions.get(stage)

    def is_ahead(self, stage: int, round: int) -> bool:
        """By the round in the version's name."""
        version = self._versions.get(stage)
        return version is not None and round < version.round

    def give_up(self, stage: int) -> bool:
        """Name none, if the newest will do."""
        return self.gone == "newest" and self._versions.pop(stage, None) is not None

    def forget(self) -> None:
        """The passes of another walk may use others."""
        self._versions.clear()
