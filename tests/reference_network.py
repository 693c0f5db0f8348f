"""The function that one of our networks computes, in PyTorch's own operations only."""

import torch
import torch.nn.functional as F


class Reference:
    """Joins skip and upsampled features along the channels, like nnU-Net, with all biases."""

    def __init__(self, topology, weights):
        """Take parameters under their names in a checkpoint; norms work as in training."""
        self.topology = topology
        self.weights = weights

    def logits(self, image):
        """Return the logits of all heads, full resolution first."""
        topology, skips, x = self.topology, [], image
        is_residual = topology.encoder == "residual"
        for level, stride in enumerate(topology.strides):
            names = [f"encoder.levels.{level}.{i}" for i in range(len(self._units(level)))]
            for number, name in enumerate(names):
                if is_residual and not (level == number == 0):
                    x = self._residual_unit(x, name, stride, level)
                else:
                    x = self._unit(x, self.weights[f"{name}.conv.weight"], name, stride)
                stride = (1, 1, 1)
            skips.append(x)
        made = {}
        for level in reversed(range(topology.num_levels - 1)):
            name = f"decoder.levels.{level}"
            stride = topology.strides[level + 1]
            bias = self.weights.get(f"{name}.up.bias")
            assert (bias is not None) == topology.upsampling_bias
            up = F.conv_transpose3d(x, self.weights[f"{name}.up.weight"], bias, stride)
            halves = [f"{name}.units.0.conv.weight", f"{name}.skip.weight"]
            weight = torch.cat([self.weights[half] for half in halves], 1)
            x = self._unit(torch.cat([up, skips[level]], 1), weight, f"{name}.units.0", (1, 1, 1))
            for number in range(1, self._decoder_units(level)):
                unit = f"{name}.units.{number}"
                x = self._unit(x, self.weights[f"{unit}.conv.weight"], unit, (1, 1, 1))
            made[level] = x
        heads = sum(name.startswith("decoder.heads.") for name in self.weights) // 2
        of_heads = (f"decoder.heads.{level}" for level in range(heads))
        return tuple(
            F.conv3d(made[level], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
            for level, name in enumerate(of_heads)
        )

    def _units(self, level):
        """Return the number of the encoder's units at a level, including a stem."""
        topology = self.topology
        if topology.encoder == "plain":
            return range(topology.units[level] if topology.units else 2)
        units = topology.units or (1, 3, 4, *[6] * topology.num_levels)
        return range(units[level] + (level == 0))

    def _decoder_units(self, level):
        if self.topology.decoder_units:
            return self.topology.decoder_units[level]
        return 2 if self.topology.encoder == "plain" else 1

    def _unit(self, x, weight, name, stride):
        return self._activated(self._normed(self._convolved(x, weight, stride), f"{name}.norm"))

    def _convolved(self, x, weight, stride):
        padding = tuple(taps // 2 for taps in weight.shape[2:])
        return F.conv3d(x, weight, None, stride, padding)

    def _residual_unit(self, x, name, stride, level):
        y = self._unit(x, self.weights[f"{name}.first.conv.weight"], f"{name}.first", stride)
        y = self._normed(
            self._convolved(y, self.weights[f"{name}.conv.weight"], (1, 1, 1)), f"{name}.norm"
        )
        if max(stride) > 1:
            x = F.avg_pool3d(x, stride, stride)
        if x.shape[1] != y.shape[1]:
            x = F.conv3d(x, self.weights[f"{name}.shortcut.1.0.weight"])
            x = self._normed(x, f"{name}.shortcut.1.1")
        return self._activated(x + y)

    def _activated(self, x):
        return torch.where(x > 0, x, self.topology.negative_slope * x)

    def _normed(self, x, name):
        """Normalise by the formula, with the biased variance."""
        nested = f"{name}.0" if f"{name}.0.weight" in self.weights else name
        n, c = x.shape[:2]
        if self.topology.norm == "batch":
            values, dims = x, (0, 2, 3, 4)
        else:
            of_group = next(g for g in (8, 4, 2, 1) if c % g == 0)
            groups = c if self.topology.norm == "instance" else of_group
            values, dims = x.reshape(n, groups, -1), (2,)
        mean = values.mean(dims, keepdim=True)
        variance = (values - mean).square().mean(dims, keepdim=True)
        normal = ((values - mean) / (variance + self.topology.norm_eps).sqrt()).reshape(x.shape)
        weight, bias = (self.weights[f"{nested}.{kind}"] for kind in ("weight", "bias"))
        return normal * weight.view(-1, 1, 1, 1) + bias.view(-1, 1, 1, 1)
