"""What a strategy can say about LARS and LAMB; plain Python, as all of a strategy."""

from fleetx.settings import Bool, Choice, Configs, Float, Int, ListOf, OrNone, Settings, Text

# As in fleetx.optim.forms, which cannot be asked: a strategy does without torch. The default comes first.
LARS_FORMS = {"fleet": 0.0, "mlperf": 0.0, "paper": 0.0, "timm": 1e-8}  # with the epsilon of each
LAMB_FORMS = ("fleet", "mlperf", "paper", "timm", "nvlamb")


class Epsilon(Float):
    """Added to the denominator of the ratio. Until somebody sets it, the form decides."""

    def read(self, settings: Settings) -> float:
        """The number in force."""
        return super().read(settings) if settings.was_given(self.name) else LARS_FORMS[settings._values["form"]]


class LayerwiseConfigs(Configs):
    """What the settings of LARS and LAMB have in common."""

    def in_force(self) -> dict[str, object]:
        """With an empty list for adaptation, which means that everybody has a ratio."""
        shown = super().in_force()
        return shown | {"exclude_from_adaptation": "nobody"} if self["exclude_from_adaptation"] == [] else shown

    def settings(self) -> dict[str, object]:
        """What Lars or Lamb is made with."""
        return {name: value for name, value in self.items() if name != "trust_ratios_every"}


class LarsConfigs(LayerwiseConfigs):
    """LARS: layer-wise learning rates around momentum SGD."""

    lars_coeff = Float(0.001, above=0)
    lars_weight_decay = Float(0.0005, at_least=0)
    epsilon = Epsilon(0.0, at_least=0)
    exclude_from_weight_decay = ListOf(Text("bias"))
    exclude_from_adaptation = OrNone(ListOf(Text("bias")))  # None: as the form says
    excluded_lr = OrNone(Float(0.1, at_least=0))  # None: lr
    zero_norm_lr = OrNone(Float(0.1, at_least=0))  # None: lr
    form = Choice(*LARS_FORMS)
    lr_in_momentum = OrNone(Bool(True))  # None: as the form says
    fused = OrNone(Bool(True))  # None: kernels where they can be
    trust_ratios_every = OrNone(Int(100, at_least=1))  # windows


class LambConfigs(LayerwiseConfigs):
    """LAMB: layer-wise learning rates around Adam."""

    lamb_weight_decay = Float(0.01, at_least=0)
    exclude_from_weight_decay = ListOf(Text("bias"))
    exclude_from_adaptation = OrNone(ListOf(Text("bias")))  # None: as the form says
    excluded_lr = OrNone(Float(0.001, at_least=0))  # None: lr
    zero_norm_lr = OrNone(Float(0.001, at_least=0))  # None: lr
    form = Choice(*LAMB_FORMS)
    always_adapt = Bool(False)
    bias_correction = Bool(True)
    fused = OrNone(Bool(True))  # None: kernels where they can be
    trust_ratios_every = OrNone(Int(100, at_least=1))  # windows
