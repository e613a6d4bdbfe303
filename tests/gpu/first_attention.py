"""The first step of a process is one that is computed again: nothing may have chosen torch's attention before."""

import torch
from torch import nn

from fleetx import memory
from fleetx.memory import Segment


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 384)

    def forward(self, x):
        heads = (part.unflatten(-1, (2, 64)).transpose(1, 2) for part in self.project(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return x + mixed.transpose(1, 2).flatten(2)


def gradient(model, x):
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(x).square().sum()
    loss.backward()
    return model[0].project.weight.grad.clone()


def main():
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).cuda()
    x = torch.randn(4, 256, 128, device="cuda")
    applied = memory.apply(model, [Segment("0", "inputs"), Segment("1", "inputs")])
    again = gradient(model, x)
    applied.remove()
    torch.testing.assert_close(again, gradient(model, x))


if __name__ == "__main__":
    main()
