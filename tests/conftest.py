"""What holds for every test."""

import worker  # noqa: F401 - before torch is loaded: idle threads shall sleep, as the suite shares its cores
