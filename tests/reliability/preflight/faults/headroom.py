"""Numbers near the edge of what the precision holds, or an eps of another size than what it is added to."""

import torch
from torch import nn

from tests.reliability.preflight.faults.fault import Fault

# ---- near the edge of fp16


class LargeActivations(Fault):
    """The first layer's outputs are near 30,000 in fp16, and the second layer makes them small again."""

    kind, loops, options = "near_range", ("amp", "mlp"), {"precision": "fp16", "init_scale": 1.0}
    says = "outputs of `first` reach 30,000 in fp16, whose largest number is 65,504"
    points_at = ("first", "second")

    def make_model(self):
        model = super().make_model()
        with torch.no_grad():
            model.first.weight.mul_(1e4)  # here
            model.first.bias.mul_(1e4)
            model.second.weight.div_(1e4)
        return model


class LargeWeights(Fault):
    """Weights in fp16, of which some are near 40,000 because their input is tiny."""

    kind, loops = "near_range", ("mlp",)
    says = "first.weight reaches 40,000 in fp16, whose largest number is 65,504"
    points_at, options = ("first.weight",), {"precision": "fp16_params"}

    def make_model(self):
        model = super().make_model()
        with torch.no_grad():
            model.first.weight[:, 7] = model.first.weight[:, 7].sign() * 4e4  # here
        return model.half()

    def make_optimizers(self):
        self.optimizers = [torch.optim.SGD(self.model.parameters(), lr=0.05)]

    def criterion(self, batch):
        x, y = batch
        return super().criterion((torch.cat([x[:, :7], x[:, 7:] / 4e4], 1).half(), y))


class GradientsVanish(Fault):
    """A loss scale of 1 and a small loss: most gradients of activations are 0 in fp16."""

    kind, loops = "near_range", ("amp", "cnn")
    says = "gradients are below fp16's smallest numbers: raise the loss scale"
    points_at, options = ("scaler", "first", "second", "conv"), {"precision": "fp16", "init_scale": 1.0}

    def criterion(self, batch):
        return super().criterion(batch) * 1e-5  # here


# ---- eps


class EpsAboveMoments(Fault):
    """The loss is so small that Adam's eps is far above its second moments."""

    kind, loops = "eps", ("mlp", "vae", "contrastive")
    says = "eps=1e-8 is far above the root of the second moments: Adam's updates are as small as the gradients"
    points_at = ("eps", "optimizers.0")

    def criterion(self, batch):
        return super().criterion(batch) * 1e-10  # here


class EpsOfZero(Fault):
    """Weights and moments are in fp16, where eps=1e-8 is 0."""

    kind, loops = "eps", ("mlp",)
    says = "eps=1e-8 is 0 in fp16: a second moment of 0 gives a division by 0"
    points_at, options = ("eps", "optimizers.0"), {"precision": "fp16_params"}

    def make_model(self):
        return super().make_model().half()

    def make_optimizers(self):
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=1e-2, betas=(0.9, 0.99), eps=1e-8)]  # here

    def criterion(self, batch):
        x, y = batch
        return 3000 * super().criterion((x.half(), y))

    def clip(self):
        nn.utils.clip_grad_value_(self.model.parameters(), 100.0)


class EpsAboveVariance(Fault):
    """The embeddings are so small that LayerNorm's eps is far above their variance."""

    kind, loops = "eps", ("gpt", "checkpointed")
    says = "the input of blocks.0.norm1 has a variance of 1e-8, far below eps=1e-5: its output is not normalized"
    points_at = ("blocks.0.norm1", "embed", "place")

    def make_model(self):
        model = super().make_model()
        nn.init.normal_(model.embed.weight, std=1e-4)  # here
        nn.init.normal_(model.place.weight, std=1e-4)
        return model


# ---- softmax


class ScoresUnscaled(Fault):
    """Attention scores in the hundreds: large weights, and no 1 / sqrt(d)."""

    kind, loops = "softmax_inputs", ("gpt", "checkpointed")
    says = "attention scores reach hundreds: each place attends to one other, and queries and keys get no gradient"
    points_at = ("blocks",)

    def make_model(self):
        model = super().make_model()
        for block in model.blocks:
            block.attention.scale = 1.0  # here
            with torch.no_grad():
                block.attention.qkv.weight.mul_(25)
        return model


class TinyTemperature(Fault):
    """The temperature is 1e-4, so that similarities are multiplied by 10,000."""

    kind, loops = "softmax_inputs", ("contrastive",)
    says = "the softmax's inputs reach 10,000: the temperature is too small"
    points_at = ("log_scale", "scale", "cross_entropy", "softmax")

    def make_model(self):
        model = super().make_model()
        nn.init.constant_(model.log_scale, 9.2)  # here
        return model


class LargeHead(Fault):
    """The head is initialised a thousand times too large."""

    kind, loops = "softmax_inputs", ("accumulation", "cnn", "finetune")
    says = "logits reach hundreds before the first step: the head's init is too large"
    points_at = ("head", "3", "cross_entropy", "softmax")

    def make_model(self):
        model = super().make_model()
        head = [*model.modules()][-1]
        with torch.no_grad():
            head.weight.mul_(1000)  # here
        return model
