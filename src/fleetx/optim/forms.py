"""The forms that go under the names LARS and LAMB, and everything they differ in.

LARS: ``ratio = lars_coeff·‖p‖ / (‖c·g‖ + decay·‖p‖ + epsilon)``, and ``u = ratio·(c·g + decay·p)``.
LAMB: ``m = b1·m + (1−b1)·c·g``, ``s = b2·s + (1−b2)·(c·g)²``, ``ratio = ‖p‖/‖r‖`` with
``r = (m/(1−b1^t)) / (√(s/(1−b2^t)) + eps) + decay·p``, and ``p = p − lr·ratio·r``.
``c = min(1, max_grad_norm/‖all g‖)``; without clipping it is 1.

| | form | lr and momentum | epsilon | bias correction | clipping | who has the ratio |
|---|---|---|---|---|---|---|
| LARS | ``fleet``, ``mlperf`` | inside: ``v = momentum·v + lr·u``, ``p = p − v`` | 0 | – | none | who is not excluded |
| LARS | ``paper`` | inside | 0 | – | none | everybody |
| LARS | ``timm`` | outside: ``v = momentum·v + u``, ``p = p − lr·v`` | 1e-8 | – | none | who has decay |
| LAMB | ``fleet`` | – | 1e-6 | inside the ratio | none | who has decay, or all with ``always_adapt`` |
| LAMB | ``mlperf`` | – | 1e-6 | inside the ratio | to 1 | who is not excluded |
| LAMB | ``paper`` | – | 1e-6 | inside the ratio | none | everybody |
| LAMB | ``timm`` | – | 1e-6 | inside the ratio | to 1 | who has decay, or all with ``always_adapt`` |
| LAMB | ``nvlamb`` | – | 1e-6 | inside the ratio | to 1 | everybody |

Excluded is what ``exclude_from_weight_decay`` takes; it never has decay. If ``exclude_from_adaptation`` is given, that
list alone decides who has the ratio, in every form. Who does not have it moves at ``lr``, or ``excluded_lr``; so does
a tensor of which a norm is zero, or at ``zero_norm_lr``. ``epsilon``, ``lr_in_momentum``, ``max_grad_norm`` and
``bias_correction`` can be given, and then come before the form.

Where they come from: ``mlperf`` is the reference of MLPerf Training: ResNet's LARS in TensorFlow, whose buffer has the
other sign (as apex's FusedLARS, of the same formula), and BERT's LAMB with the gradients clipped before it. TensorFlow
2 puts 1e-7 in the place of an epsilon of 0; the published points were run with 0. ``paper`` is You et al. 2017
(algorithm 1) and 2020 (algorithm 2, versions 3 and later; the identity as its φ), which exclude nobody from the ratio.
``timm`` is timm's; its LAMB is apex's FusedLAMB too, and ``nvlamb`` that with ``use_nvlamb``.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, TypeVar

Adapted = Literal["not excluded", "decayed", "everybody"]


@dataclass(frozen=True)
class LarsForm:
    """What a form of LARS prescribes."""

    lr_in_momentum: bool
    adapted: Adapted
    epsilon: float = 0.0


@dataclass(frozen=True)
class LambForm:
    """What a form of LAMB prescribes."""

    adapted: Adapted
    max_grad_norm: float | None


LARS_FORMS = {
    "fleet": LarsForm(lr_in_momentum=True, adapted="not excluded"),
    "mlperf": LarsForm(lr_in_momentum=True, adapted="not excluded"),
    "paper": LarsForm(lr_in_momentum=True, adapted="everybody"),
    "timm": LarsForm(lr_in_momentum=False, adapted="decayed", epsilon=1e-8),
}
LAMB_FORMS = {
    "fleet": LambForm(adapted="decayed", max_grad_norm=None),
    "mlperf": LambForm(adapted="not excluded", max_grad_norm=1.0),
    "paper": LambForm(adapted="everybody", max_grad_norm=None),
    "timm": LambForm(adapted="decayed", max_grad_norm=1.0),
    "nvlamb": LambForm(adapted="everybody", max_grad_norm=1.0),
}

# Not forms of their own, and likely to be asked for.
APEX = {"LARS": "'mlperf'", "LAMB": "'timm', and with use_nvlamb 'nvlamb'"}

Form = TypeVar("Form")


def named(forms: dict[str, Form], name: Any, algorithm: str) -> Form:
    """The form of this name."""
    if isinstance(name, str) and name in forms:
        return forms[name]
    near = get_close_matches(name.lower(), forms, n=1) if isinstance(name, str) else []
    meant = f"did you mean {near[0]!r}?" if near else "'fleet' is the default."
    if isinstance(name, str) and name.lower() == "apex":
        meant = f"apex's is {APEX[algorithm]}."
    error = ValueError if isinstance(name, str) else TypeError
    raise error(f"form of {algorithm} must be one of {', '.join(map(repr, forms))}, got {name!r}: {meant}")


def has_ratio(adapted: Adapted, *, listed: bool, kept: bool, decay: float, always: bool = False) -> bool:
    """Whether a parameter has a trust ratio.

    `kept` is False if a list excludes it from adaptation; `listed` says that this list was given for adaptation, and
    not taken over from decay.
    """
    if listed:
        return kept
    if always or adapted == "everybody":
        return True
    return kept if adapted == "not excluded" else decay != 0
