"""Named values out of the forward and the backward of a model's steps, as data beside its gradients.

    cfg = with_logs(model, {"blocks.*.attn": ("dx_norm", "y_norm")})          # what is asked is in the config
    work = logs_init(params, cfg)                                              # a leaf more at each of these steps
    loss, grads = value_and_grad(chain)(work, x, cfg)
    grads, logs = split_logs(grads, cfg)                                       # logs["blocks.*.attn"]["dx_norm"]: [layers]

JAX's `with_logs` is the model: nothing is global, and a step without logs runs the same program as before.
"""

from funcops.logs.calibrate import calibrated, calibration_logs
from funcops.logs.logged import LoggedConfig, logged
from funcops.logs.noise import Noise, gradient_noise, param_logs, total_norm
from funcops.logs.rewrite import logs_init, logs_needs, split_logs, with_logs

__all__ = ["LoggedConfig", "Noise", "gradient_noise", "logged", "logs_init", "logs_needs", "param_logs", "split_logs"]
__all__ += ["calibrated", "calibration_logs", "total_norm", "with_logs"]
