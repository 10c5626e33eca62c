"""How long the property tests search: briefly by default, long with `HYPOTHESIS_PROFILE=nightly pytest --timeout 0`.

The profile `planted` looks for a failure without making it small: that there is one is all that planted bugs ask.
"""

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "default", max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=3000, stateful_step_count=120)
settings.register_profile(
    "planted", settings.get_profile("default"), phases=(Phase.explicit, Phase.generate), database=None
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
