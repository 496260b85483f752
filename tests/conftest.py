"""Hypothesis profiles: the default keeps the suite short; `HYPOTHESIS_PROFILE=deep` digs."""

import os

from hypothesis import HealthCheck, settings

slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("ci", deadline=None, max_examples=60, suppress_health_check=slow)
settings.register_profile("deep", deadline=None, max_examples=2000, suppress_health_check=slow)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
