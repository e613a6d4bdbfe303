"""Small models of many kinds: how each is fed, and where it can be cut."""

import itertools
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fleetx.applications import Bert_base, Resnet50
from tests.memory.comparing import Example


def every(names, count):
    """Each `count`-th of the names, the last one of them the last."""
    return names[::-1][::count][::-1]


def cuts_of(blocks, *operations, **others):
    """The usual choices for a list of blocks: all, every third, one; and operations between modules."""
    chosen = {"blocks": list(blocks), "thirds": every(list(blocks), 3), "one": [blocks[len(blocks) // 2]]}
    if operations:
        chosen["operations"] = list(operations)
    return chosen | others


def seeded(number):
    return torch.Generator().manual_seed(number)


def normal(step, *shape):
    """Each step has other numbers, whatever the model drew before."""
    return torch.randn(*shape, generator=seeded(step))


def integers(step, high, *shape):
    return torch.randint(high, shape, generator=seeded(step))


# Images -----------------------------------------------------------------------------------------------------------


def resnet():
    torch.manual_seed(0)
    model = Resnet50(classes=5, depths=(2, 1, 1, 1), width=2)

    def batch(step):
        pixels = torch.randint(256, (3, 3, 32, 32), generator=seeded(step), dtype=torch.uint8)
        return pixels, integers(step, 5, 3)

    inside = ["layer1.0.bn2", "layer2.0.conv3", "layer3.0:add", "layer4.0:relu_1"]
    return Example(model, batch, cuts_of(model.checkpoints, *inside), lambda output: output["loss"])


class UNet(nn.Module):
    """Shortcuts cross every cut."""

    def __init__(self, width=4, depth=3):
        super().__init__()
        sizes = [width * 2**level for level in range(depth + 1)]
        self.begin = self.block(3, sizes[0])
        self.down = nn.ModuleList(self.block(a, b) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(self.block(a + b, a) for a, b in itertools.pairwise(sizes))
        self.end = nn.Conv2d(width, 1, 1)

    @staticmethod
    def block(channels_in, channels):
        return nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, padding=1),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Dropout2d(0.1),
        )

    def forward(self, images):
        hidden = self.begin(images)
        skips = []
        for block in self.down:
            skips.append(hidden)
            hidden = block(F.max_pool2d(hidden, 2))
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            hidden = F.interpolate(hidden, scale_factor=2, mode="nearest")
            hidden = block(torch.cat([hidden, skip], 1))
        return self.end(hidden)


def unet():
    torch.manual_seed(0)
    names = ["begin", "down.0", "down.1", "down.2", "up.2", "up.1", "up.0"]
    cuts = cuts_of(names, ":max_pool2d", ":max_pool2d_2", ":cat", ":interpolate_2")
    return Example(UNet(), lambda step: (normal(step, 2, 3, 16, 16),), cuts)


class DenseLayer(nn.Module):
    def __init__(self, channels, growth):
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1)

    def forward(self, features: list[Tensor]):
        return self.conv(self.relu(self.norm(torch.cat(features, 1))))


class DenseNet(nn.Module):
    """Each layer reads the outputs of all before it."""

    def __init__(self, layers=5, channels=4, growth=3):
        super().__init__()
        self.begin = nn.Conv2d(3, channels, 3, padding=1)
        self.layers = nn.ModuleList(DenseLayer(channels + growth * index, growth) for index in range(layers))
        self.head = nn.Linear(channels + growth * layers, 4)

    def forward(self, images):
        features = [self.begin(images)]
        for layer in self.layers:
            features.append(layer(features))
        return self.head(torch.cat(features, 1).mean((2, 3)))


def densenet():
    torch.manual_seed(0)
    names = [f"layers.{index}" for index in range(5)]
    cuts = cuts_of(names, "layers.1.relu", "layers.3:cat", "layers.4.norm", ":mean")
    return Example(DenseNet(), lambda step: (normal(step, 2, 3, 8, 8),), cuts)


class LayerScaleBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, images):
        hidden = self.depthwise(images).permute(0, 2, 3, 1)
        hidden = self.scale * self.narrow(F.gelu(self.wide(self.norm(hidden))))
        hidden = hidden.permute(0, 3, 1, 2)
        if self.training:  # stochastic depth
            keep = torch.rand(len(images), 1, 1, 1, dtype=images.dtype, device=images.device) < 0.8
            hidden = hidden * keep / 0.8
        return images + hidden


class ConvNeXt(nn.Module):
    def __init__(self, width=4, depth=4):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.blocks = nn.Sequential(*(LayerScaleBlock(width) for _ in range(depth)))
        self.head = nn.Linear(width, 3)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((-2, -1)))


def convnext():
    torch.manual_seed(0)
    names = [f"blocks.{index}" for index in range(4)]
    cuts = cuts_of(names, "blocks.0:permute", "blocks.1:rand", "blocks.2:gelu", "blocks.3:add")
    return Example(ConvNeXt(), lambda step: (normal(step, 3, 3, 16, 16),), cuts)


class Attention(nn.Module):
    def __init__(self, width, heads=2, dropout=0.0):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.both = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, reads: Tensor, looks_at: Tensor, *, mask: Tensor | None = None, causal: bool = False):
        query = self.query(reads).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        key, value = self.both(looks_at).chunk(2, -1)
        key = key.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        value = value.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's layer, with cross attention if it is given something to look at."""

    def __init__(self, width, heads=2, dropout=0.1, crosses=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.cross = Attention(width, heads, dropout) if crosses else None
        self.norm3 = nn.LayerNorm(width) if crosses else None
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, looks_at=None, *, mask=None, causal=False):
        normed = self.norm1(hidden)
        hidden = hidden + self.dropout(self.attention(normed, normed, mask=mask, causal=causal))
        if self.cross is not None:
            hidden = hidden + self.cross(self.norm3(hidden), looks_at)
        return hidden + self.dropout(self.mlp(self.norm2(hidden)))


class ViT(nn.Module):
    """A class token and position embeddings, put in place by operations between the modules."""

    def __init__(self, width=8, depth=4):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, width) * 0.1)
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 3)

    def forward(self, images):
        hidden = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.token.expand(len(images), -1, -1), hidden], 1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, 0]))


def vit():
    torch.manual_seed(0)
    names = [f"blocks.{index}" for index in range(4)]
    cuts = cuts_of(names, ":cat", ":add", "blocks.1:add", "blocks.3.attention:scaled_dot_product_attention")
    return Example(ViT(), lambda step: (normal(step, 2, 3, 16, 16),), cuts)


# Language ---------------------------------------------------------------------------------------------------------


def bert_batch(step, n=4, length=12, words=40):
    lengths = torch.tensor([length, length - 3, length - 5, length - 1])[:n]
    positions = torch.stack([torch.tensor([1, 3, -1]), torch.tensor([2, -1, -1])] * (n // 2))
    labels = torch.where(positions < 0, -100, integers(step + 7, words, n, 3))
    return {
        "input_ids": integers(step, words, n, length),
        "token_type_ids": integers(step + 3, 2, n, length),
        "attention_mask": (torch.arange(length) < lengths[:, None]).long(),
        "masked_positions": positions,
        "masked_labels": labels,
        "next_sentence_labels": integers(step, 2, n),
    }


def bert(unpad=False):
    torch.manual_seed(0)
    model = Bert_base(
        layers=4, width=8, heads=2, vocab_size=40, max_positions=16, loss_chunk=4, initializer_range=0.2, unpad=unpad
    )
    inside = "bert.encoder.layer.1.attention", "bert.encoder.layer.2.intermediate", "bert.embeddings", "bert"
    cuts = cuts_of(model.checkpoints, inside=list(inside), all=[*model.checkpoints, "bert.embeddings", "bert.pooler"])
    return Example(model, bert_batch, cuts, lambda losses: losses["mlm"] + losses["nsp"])


def bert_unpadded():
    return bert(unpad=True)


class Gpt(nn.Module):
    """Causal, with one matrix for the embedding and the head."""

    def __init__(self, words=30, width=8, depth=5):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width, crosses=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids, labels):
        hidden = self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            hidden = block(hidden, causal=True)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten())


def gpt():
    torch.manual_seed(0)
    names = [f"blocks.{index}" for index in range(5)]
    cuts = cuts_of(names, ":add", "blocks.2:add", "blocks.4.mlp.1", tied=["words", "blocks.2", "head"])

    def batch(step):
        ids = integers(step, 30, 3, 11)
        return ids[:, :-1], ids[:, 1:]

    return Example(Gpt(), batch, cuts, lambda loss: loss)


class T5(nn.Module):
    """An encoder whose output every block of the decoder reads, and a bias computed once for all blocks."""

    def __init__(self, words=30, width=8, depth=3, heads=2):
        super().__init__()
        self.heads = heads
        self.words = nn.Embedding(words, width)
        self.distances = nn.Embedding(7, heads)
        self.encoder = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.decoder = nn.ModuleList(Block(width, heads, crosses=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def bias(self, length):
        places = torch.arange(length, device=self.words.weight.device)
        return self.distances((places[None] - places[:, None]).clamp(-3, 3) + 3).permute(2, 0, 1)

    def forward(self, source, target):
        hidden, bias = self.words(source), self.bias(source.shape[1])
        for block in self.encoder:
            hidden = block(hidden, mask=bias.expand(len(source), -1, -1, -1))
        memory, hidden = self.norm(hidden), self.words(target)
        bias = self.bias(target.shape[1])
        bias = bias.masked_fill(torch.ones(bias.shape[1:], dtype=torch.bool, device=bias.device).triu(1), -1e4)
        for block in self.decoder:
            hidden = block(hidden, memory, mask=bias)
        return {"logits": hidden @ self.words.weight.t() / math.sqrt(hidden.shape[-1]), "memory": memory}


def t5():
    torch.manual_seed(0)
    names = [f"encoder.{index}" for index in range(3)] + ["norm"] + [f"decoder.{index}" for index in range(3)]
    cuts = cuts_of(names, ":masked_fill", "decoder.1:add", "decoder.2.cross", ":matmul", shared=["words", "distances"])
    return Example(T5(), lambda step: (integers(step, 30, 2, 7), integers(step + 9, 30, 2, 5)), cuts)


class Tagger(nn.Module):
    """Recurrent: several outputs, a tuple of states handed from one to the next."""

    def __init__(self, words=20, width=6):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.first = nn.LSTM(width, width, num_layers=2, dropout=0.2, batch_first=True)
        self.second = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.cell = nn.LSTMCell(2 * width, width)
        self.last = nn.Linear(width, 5)

    def forward(self, ids):
        hidden, state = self.first(self.words(ids))
        hidden, (h, c) = self.second(hidden, tuple(s[:1].repeat(2, 1, 1) for s in state))
        h, c = h[0], c[1]
        outputs = []
        for column in hidden.unbind(1):
            h, c = self.cell(column, (h, c))
            outputs.append(h)
        return self.last(torch.stack(outputs, 1)), (h, c)


def lstm():
    torch.manual_seed(0)
    cuts = {
        "blocks": ["words", "first", "second"],
        "one": ["second"],
        "thirds": ["first", "cell"],
        "operations": [":unbind", ":stack"],
        "called often": ["cell"],
    }
    return Example(Tagger(), lambda step: (integers(step, 20, 3, 6),), cuts)


class Experts(nn.Module):
    """Each token goes to the two experts that it likes best; those without any tokens do not run."""

    def __init__(self, width, count=4):
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(inplace=True), nn.Linear(2 * width, width))
            for _ in range(count)
        )
        self.register_buffer("load", torch.zeros(count))
        self.balance = torch.zeros(())

    def forward(self, hidden):
        tokens = hidden.flatten(0, -2)
        weights = self.gate(tokens).softmax(-1)
        if self.training:
            weights = weights + torch.rand_like(weights) * 0.01
        best, chosen = weights.topk(2, -1)
        output = torch.zeros_like(tokens)
        counts = torch.zeros_like(self.load)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            counts[number] = len(rows)
            if len(rows) == 0:
                continue
            scaled = expert(tokens[rows]) * best[rows, place, None].to(tokens.dtype)
            output.index_add_(0, rows, scaled.to(output.dtype))
        if self.training:
            self.load.mul_(0.9).add_(counts, alpha=0.1)
        self.balance = (weights.mean(0) * counts).sum()
        return output.view_as(hidden)


class Mixture(nn.Module):
    def __init__(self, width=6, depth=3):
        super().__init__()
        self.begin = nn.Linear(4, width)
        self.blocks = nn.ModuleList(Experts(width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))

    def forward(self, features):
        hidden = self.begin(features)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            hidden = hidden + block(norm(hidden))
        return hidden, sum(block.balance for block in self.blocks)


def mixture_of_experts():
    torch.manual_seed(0)
    names = [f"blocks.{index}" for index in range(3)]
    inside = ["blocks.0:rand_like", "blocks.1.gate", "blocks.1:zeros_like", "blocks.2:index_add"]
    cuts = cuts_of(names, *inside, experts=["blocks.0.experts.*", "blocks.2"])
    return Example(Mixture(), lambda step: (normal(step, 3, 4, 4),), cuts)


# Others -----------------------------------------------------------------------------------------------------------


class Gan(nn.Module):
    """A generator, and a discriminator with spectral norm that is called twice."""

    def __init__(self, spectral_norm, width=6):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Linear(width, 5), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            spectral_norm(nn.Linear(5, width)),
            nn.LeakyReLU(0.2, inplace=True),
            spectral_norm(nn.Linear(width, width)),
            nn.LeakyReLU(0.2),
            spectral_norm(nn.Linear(width, 1)),
        )

    def forward(self, real):
        fake = self.generator(torch.randn(len(real), 4, dtype=real.dtype, device=real.device))
        return self.discriminator(real), self.discriminator(fake)


def gan(spectral_norm=nn.utils.parametrizations.spectral_norm):
    torch.manual_seed(0)
    names = ["generator.2", "generator", "discriminator.1", "discriminator.3", "discriminator"]
    cuts = cuts_of(names, ":randn", "discriminator.0", "generator.0")

    def loss(output):
        real, fake = output
        return F.softplus(-real.float()).mean() + F.softplus(fake.float()).mean()

    return Example(Gan(spectral_norm), lambda step: (normal(step, 4, 5),), cuts, loss)


def gan_with_the_old_spectral_norm():
    return gan(nn.utils.spectral_norm)


class TwoTowers(nn.Module):
    """Images and texts against each other: the loss couples the whole batch."""

    def __init__(self, width=8):
        super().__init__()
        self.images = ViT(width, depth=2)
        self.images.head = nn.Linear(width, width)
        self.words = nn.Embedding(20, width)
        self.texts = nn.ModuleList(Block(width) for _ in range(2))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, images, ids):
        seen = F.normalize(self.images(images), dim=-1)
        hidden = self.words(ids)
        for block in self.texts:
            hidden = block(hidden)
        read = F.normalize(hidden.mean(1), dim=-1)
        logits = self.temperature.exp() * seen @ read.t()
        labels = torch.arange(len(images), device=images.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def clip():
    torch.manual_seed(0)
    names = ["images.blocks.0", "images.blocks.1", "images", "texts.0", "texts.1"]
    cuts = cuts_of(names, ":normalize", ":matmul", "images:cat", "texts.1:add_1")
    batch = lambda step: (normal(step, 4, 3, 16, 16), integers(step, 20, 4, 6))  # noqa: E731
    return Example(TwoTowers(), batch, cuts, lambda loss: loss)


MODELS = {
    make.__name__: make
    for make in (
        resnet,
        unet,
        densenet,
        convnext,
        vit,
        bert,
        bert_unpadded,
        gpt,
        t5,
        lstm,
        mixture_of_experts,
        gan,
        gan_with_the_old_spectral_norm,
        clip,
    )
}
