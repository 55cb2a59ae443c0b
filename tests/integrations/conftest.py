"""Settings of the packages that are tested here: nothing leaves this machine."""

from __future__ import annotations

import os

# LiteLLM fetches its prices from the internet when it is imported, unless it is told not to.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
