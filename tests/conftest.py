"""For all tests: one core for torch and numba, which crawl with two beside other load; hypothesis without deadlines."""

import numba
import torch
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
torch.set_num_threads(1)
numba.set_num_threads(1)
