"""The guide's applications: the same models, built without memory, with a symbolic `loss`."""

from typing import Any

from torch import nn

from fleetx import applications
from fleetx.compat.variables import LossVariable
from fleetx.static import build


def Resnet50(**settings: Any) -> nn.Module:  # noqa: N802
    """ResNet-50 for a static program."""
    return _for_program(applications.Resnet50, settings)


def Bert_base(**settings: Any) -> nn.Module:  # noqa: N802
    """BERT-base for a static program."""
    return _for_program(applications.Bert_base, settings)


def Bert_large(**settings: Any) -> nn.Module:  # noqa: N802
    """BERT-large for a static program."""
    return _for_program(applications.Bert_large, settings)


def _for_program(kind: Any, settings: dict[str, Any]) -> nn.Module:
    model = build(kind, **settings)
    object.__setattr__(model, "loss", LossVariable(model))
    return model
