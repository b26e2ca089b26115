"""The networks of the loops."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Regression(nn.Module):
    """An MLP with one hidden layer."""

    def __init__(self, inputs: int = 8, width: int = 32, outputs: int = 1) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, width), nn.Linear(width, width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[batch, outputs]`."""
        return self.head(F.gelu(self.second(F.gelu(self.first(x)))))


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm, and a linear head."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 16, 3, padding=1, stride=2), nn.BatchNorm2d(16)
        self.head = nn.Linear(16, classes)

    def features(self, x: Tensor) -> Tensor:
        """Returns `[batch, 16]`."""
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x))).mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits, `[batch, classes]`, of images `[batch, 1, height, width]`."""
        return self.head(self.features(x))


class Attention(nn.Module):
    """Causal attention with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.scale = (width // 2) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[batch, time, width]`."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2)).float() * self.scale
        mask = torch.ones(time, time, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, -torch.inf).softmax(-1).to(v.dtype)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))


class Block(nn.Module):
    """A pre-norm block of a transformer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def mlp(self, x: Tensor) -> Tensor:
        """Returns the feed-forward part."""
        return self.dropout(self.down(F.gelu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[batch, time, width]`."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A small GPT; its head is the embedding of the tokens (tied)."""

    def __init__(self, vocab: int, time: int, width: int = 16, blocks: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocab, width), nn.Embedding(time, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.head.weight = self.embed.weight
        self.checkpointed = False

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits, `[batch, time, vocab]`."""
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Recurrent(nn.Module):
    """A GRU language model with a tied head."""

    def __init__(self, vocab: int, width: int = 16) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocab, width), nn.GRU(width, width, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, vocab)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits, `[batch, time, vocab]`."""
        return self.head(self.dropout(self.gru(self.embed(tokens))[0]))


class Autoencoder(nn.Module):
    """A VAE, whose noise comes from a generator of its own."""

    def __init__(self, inputs: int, latent: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(inputs, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.Tanh(), nn.Linear(32, inputs))

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and log variance of the latent variables, `[batch, latent]` each."""
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return mean, log_variance

    def latent(self, mean: Tensor, log_variance: Tensor, generator: torch.Generator) -> Tensor:
        """Returns latent variables, `[batch, latent]`."""
        return mean + (log_variance / 2).exp() * torch.randn(mean.shape, generator=generator)

    def forward(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the reconstruction, and mean and log variance of the latent variables."""
        mean, log_variance = self.encode(x)
        return self.decoder(self.latent(mean, log_variance, generator)), mean, log_variance


class Towers(nn.Module):
    """Two encoders and a learned temperature, as in CLIP."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 16))
        self.text = nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, 16))
        self.log_scale = nn.Parameter(torch.tensor(1.0))

    def scale(self) -> Tensor | float:
        """Returns what similarities are multiplied with."""
        return self.log_scale.exp()

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        """Returns similarities, `[batch, batch]`."""
        z_one, z_two = F.normalize(self.image(one).float(), dim=1), F.normalize(self.text(two).float(), dim=1)
        return self.scale() * z_one @ z_two.T
