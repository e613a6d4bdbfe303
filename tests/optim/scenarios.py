"""Random jobs of the whole optimizer: every form, dtype, order of memory, exclusion, clipping and kind of skip.

The same jobs are run by the foreach form, by kernels in Triton's interpreter, and by kernels on a device; the fp64
restatement in `reference` says what must come out.
"""

from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from fleetx.optim import Lamb, Lars
from fleetx.optim.plan import Tuning

from .reference import LAMB_FORMS, LARS_FORMS, LambReference, LarsReference

SHAPES = [(), (3,), (0, 2), (2, 3), (5, 3, 2, 2), (4, 1, 1, 3), (70,), (131,)]
LAYOUTS = ["plain", "plain", "channels_last", "gaps", "offset", "transposed"]
LOW = (torch.bfloat16, torch.float16)
BASE_LR = 0.1
NORMAL, FLAGGED, NAN = "normal", "flagged", "nan"


@dataclass
class Entry:
    """One parameter: its shape, its order of memory and its gradient's, its dtypes, and whether it is excluded."""

    shape: tuple
    layout: str
    gradient_layout: str
    dtype: torch.dtype
    gradient_dtype: torch.dtype
    excluded: bool
    unadapted: bool  # by the list for adaptation, where there is one
    zero: bool
    missing: list  # per step: no gradient


@dataclass
class Scenario:
    """One job."""

    kind: str
    form: str
    entries: list
    settings: dict
    fates: list
    lrs: list
    scale: float | None
    lr_as_tensor: bool
    tuning: Tuning
    seed: int

    @property
    def exact(self):
        return all(entry.dtype == torch.float64 for entry in self.entries)


@st.composite
def scenarios(
    draw, steps=3, dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16), kinds=("lars", "lamb")
):
    kind = draw(st.sampled_from(kinds))
    common = {"max_grad_norm": draw(st.sampled_from([None, 0.7, 1e4]))}
    if kind == "lars":
        form = draw(st.sampled_from(LARS_FORMS))
        settings = {
            "momentum": draw(st.sampled_from([0.0, 0.9])),
            "lars_coeff": draw(st.sampled_from([0.001, 0.02, 1.0])),
            "lars_weight_decay": draw(st.sampled_from([0.0, 5e-4, 0.1])),
            "epsilon": draw(st.sampled_from([0.0, 1e-8, 0.5, "form"])),
        }
    else:
        form = draw(st.sampled_from(LAMB_FORMS))
        settings = {
            "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.9), (0.5, 0.0)])),
            "eps": draw(st.sampled_from([1e-6, 1e-3])),
            "lamb_weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
            "bias_correction": draw(st.booleans()),
        }
        if draw(st.booleans()):
            common = {}
    fates = draw(st.lists(st.sampled_from([NORMAL, NORMAL, FLAGGED, NAN]), min_size=steps, max_size=steps))
    flag = st.booleans()
    common |= {
        "excluded_lr": draw(st.sampled_from([None, None, 0.02])),
        "zero_norm_lr": draw(st.sampled_from([None, None, 0.005])),
        "exclude_from_adaptation": draw(st.sampled_from([None, None, "some"])),
    }
    mixed = draw(flag)
    one = draw(st.sampled_from(dtypes))

    def entry():
        dtype = draw(st.sampled_from(dtypes)) if mixed else one
        missing = [draw(st.integers(0, 5)) == 0 for _ in range(steps)]
        return Entry(
            shape=draw(st.sampled_from(SHAPES)),
            layout=draw(st.sampled_from(LAYOUTS)),
            gradient_layout=draw(st.sampled_from(LAYOUTS)),
            dtype=dtype,
            gradient_dtype=torch.float32 if dtype in LOW and draw(flag) else dtype,
            excluded=draw(flag),
            unadapted=draw(flag),
            zero=draw(st.integers(0, 6)) == 0,
            missing=missing,
        )

    return Scenario(
        kind=kind,
        form=form,
        entries=[entry() for _ in range(draw(st.integers(1, 5)))],
        settings={**settings, **common, "skip_nonfinite": NAN in fates},
        fates=fates,
        lrs=draw(st.lists(st.sampled_from([0.0, 0.01, 0.3]), min_size=steps, max_size=steps)),
        scale=draw(st.sampled_from([None, 8.0])),
        lr_as_tensor=draw(flag),
        tuning=Tuning(*draw(st.sampled_from([(64, 1, 1), (64, 2, 4), (128, 1, 4)]))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def arranged(values, layout, dtype, device):
    """A tensor of these values in one of the orders of memory."""
    tensor = torch.tensor(values, dtype=dtype, device=device)
    if layout == "channels_last" and tensor.ndim == 4:
        return tensor.to(memory_format=torch.channels_last)
    if layout == "gaps" and tensor.ndim and tensor.numel():
        return tensor.repeat_interleave(2, dim=-1)[..., ::2]
    if layout == "offset":
        flat = torch.empty(tensor.numel() + 1, dtype=dtype, device=device)
        flat[1:] = tensor.reshape(-1)
        return flat[1:].view(tensor.shape)
    if layout == "transposed" and tensor.ndim >= 2:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    return tensor


def make_optimizer(scenario, tensors, device, fused):
    named = [
        (f"{number}.{'left_out' if entry.excluded else 'kept'}.{'unadapted' if entry.unadapted else 'x'}", tensor)
        for number, (entry, tensor) in enumerate(zip(scenario.entries, tensors, strict=True))
    ]
    patterns = ["left_out"] if any(entry.excluded for entry in scenario.entries) else []
    cls = {"lars": Lars, "lamb": Lamb}[scenario.kind]
    settings = dict(scenario.settings)
    if settings["exclude_from_adaptation"] is not None:
        settings["exclude_from_adaptation"] = ["unadapted"] if any(e.unadapted for e in scenario.entries) else []
    optimizer = cls(named, lr=BASE_LR, form=scenario.form, exclude_from_weight_decay=patterns, fused=fused, **settings)
    optimizer._fused_step.tuning = scenario.tuning
    return optimizer


def make_reference(scenario, values):
    excluded = [entry.excluded for entry in scenario.entries]
    settings = scenario.settings
    common = {
        "unadapted": None
        if settings["exclude_from_adaptation"] is None
        else [entry.unadapted for entry in scenario.entries],
        **{
            name: 1.0 if settings[name] is None else settings[name] / BASE_LR
            for name in ("excluded_lr", "zero_norm_lr")
        },
    }
    if scenario.kind == "lars":
        return LarsReference(
            values,
            excluded,
            form=scenario.form,
            momentum=settings["momentum"],
            coeff=settings["lars_coeff"],
            decay=settings["lars_weight_decay"],
            epsilon=settings["epsilon"],
            limit=settings["max_grad_norm"],
            **common,
        )
    default = 1.0 if scenario.form in ("mlperf", "timm", "nvlamb") else None
    return LambReference(
        values,
        excluded,
        form=scenario.form,
        betas=settings["betas"],
        eps=settings["eps"],
        decay=settings["lamb_weight_decay"],
        limit=settings.get("max_grad_norm", default),
        bias_correction=settings["bias_correction"],
        **common,
    )


def as_numbers(tensor):
    return tensor.detach().double().cpu().numpy()


def check(scenario, *, device="cpu", fused, rounds_to_nearest=True):
    """Run the job, and compare every weight and every state after every step."""
    random = np.random.default_rng(scenario.seed)
    tensors = []
    for entry in scenario.entries:
        values = (
            np.zeros(entry.shape) if entry.zero else random.normal(size=entry.shape) * 10.0 ** random.integers(-2, 2)
        )
        tensors.append(nn.Parameter(arranged(values, entry.layout, entry.dtype, device)))
        if entry.gradient_dtype != entry.dtype:
            tensors[-1].grad_dtype = entry.gradient_dtype
    optimizer = make_optimizer(scenario, tensors, device, fused)
    values = [as_numbers(tensor) for tensor in tensors]
    reference = make_reference(scenario, values)
    longest = {(number, "weights"): np.linalg.norm(np.ravel(value)) for number, value in enumerate(values)}
    for step, (fate, lr) in enumerate(zip(scenario.fates, scenario.lrs, strict=True)):
        gradients = []
        for entry, tensor in zip(scenario.entries, tensors, strict=True):
            values = random.normal(size=entry.shape) * 10.0 ** random.integers(-2, 2) * (scenario.scale or 1.0)
            if not entry.missing[step] and fate == NAN and values.size:
                values.reshape(-1)[-1] = random.choice([np.nan, np.inf])
            gradient = (
                None if entry.missing[step] else arranged(values, entry.gradient_layout, entry.gradient_dtype, device)
            )
            tensor.grad = gradient
            gradients.append(None if gradient is None else as_numbers(gradient) / (scenario.scale or 1.0))
        before = [tensor.grad.clone() if tensor.grad is not None else None for tensor in tensors]
        set_lr(optimizer, lr, scenario.lr_as_tensor, device)
        give_scale(optimizer, scenario.scale, fate == FLAGGED, device)
        optimizer.step()
        usable = all(g is None or np.isfinite(g).all() for g in gradients)
        if fate != FLAGGED and usable:
            reference.step(gradients, lr)
        compare(scenario, optimizer, tensors, reference, longest, rounds_to_nearest)
        for tensor, old in zip(tensors, before, strict=True):  # gradients are not overwritten
            assert old is None or torch.equal(tensor.grad.nan_to_num(), old.nan_to_num())


def set_lr(optimizer, lr, as_tensor, device):
    optimizer.param_groups[0]["lr"] = torch.tensor(lr, dtype=torch.float64, device=device) if as_tensor else lr


def give_scale(optimizer, scale, found_inf, device):
    """As torch's GradScaler does."""
    optimizer.grad_scale = None if scale is None else torch.tensor(scale, device=device)
    optimizer.found_inf = torch.tensor(float(found_inf), device=device)


def compare(scenario, optimizer, tensors, reference, longest, rounds_to_nearest):
    # The length of all gradients together is no more exact than the least exact of them.
    exact = scenario.exact or reference.limit is None
    for number, (entry, tensor) in enumerate(zip(scenario.entries, tensors, strict=True)):
        state = optimizer.state.get(tensor, {})
        close = {"rtol": 1e-11, "atol": 1e-11} if exact and entry.dtype == torch.float64 else None
        weights = state.get("master", tensor)
        if entry.dtype in LOW and state and tensor.numel():
            assert weights.dtype == torch.float32
            if rounds_to_nearest:
                assert torch.equal(tensor, weights.to(entry.dtype))
            else:
                torch.testing.assert_close(tensor.float(), weights, rtol=2**-7, atol=1e-6)
        expected = {"weights": reference.values[number], **reference.state(number)}
        for name, value in expected.items():
            own = weights if name == "weights" else state.get(name)
            # What two long steps leave of each other is no more exact than they were.
            size = longest[number, name] = max(longest.get((number, name), 0.0), np.linalg.norm(np.ravel(value)))
            if own is not None and tensor.numel():
                near(as_numbers(own), value, close, size)


def near(ours, theirs, exactly, size):
    """Elements of fp64, or in fp32 the whole tensor relative to the longest it has been."""
    if exactly:
        np.testing.assert_allclose(ours, theirs, **exactly)
    else:
        error = np.linalg.norm(np.ravel(ours - theirs))
        assert error <= 1e-5 * size + 1e-9, (error, size)


def hundred_steps(kind, values, settings, *, device, fused, tuning, steps=100, dtype=torch.float32):
    """The worst relative distance of a tensor from the reference, after steps with gradients that pull and shake."""
    random = np.random.default_rng(1)
    entries = [Entry(v.shape, "plain", "plain", dtype, dtype, v.ndim == 1, False, False, []) for v in values]
    settings = {**settings, **dict.fromkeys(["excluded_lr", "zero_norm_lr", "exclude_from_adaptation"])}
    scenario = Scenario(
        kind, "fleet", entries, {**settings, "skip_nonfinite": False}, [], [], None, False, tuning, seed=0
    )
    tensors = [nn.Parameter(torch.tensor(value, dtype=dtype, device=device)) for value in values]
    optimizer = make_optimizer(scenario, tensors, device, fused)
    reference = make_reference(scenario, [as_numbers(tensor) for tensor in tensors])
    for step in range(steps):
        lr = 0.1 * (1 - step / steps) ** 2
        gradients = [0.1 * value + 0.03 * random.normal(size=value.shape) for value in values]
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = torch.tensor(gradient, dtype=dtype, device=device)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        reference.step([as_numbers(tensor.grad) for tensor in tensors], lr)
    weights = [optimizer.state[tensor].get("master", tensor) for tensor in tensors]
    return max(
        np.linalg.norm(np.ravel(as_numbers(ours) - theirs)) / np.linalg.norm(np.ravel(theirs))
        for ours, theirs in zip(weights, reference.values, strict=True)
    )
