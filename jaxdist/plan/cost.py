"""What a run takes in hours and dollars, in words. No JAX here."""

import math
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from jaxdist.runtime.budget import UNIT, money_range, round_up, sentence


@dataclass(frozen=True)
class Cost:
    """What a run costs, in dollars, against a budget that may be None. error: half-width of the bar of `hours`."""

    num_devices: int
    price_per_hour: float
    hours: float
    budget: float | None = None
    device: str = "GPU"
    error: float = 0.0

    @property
    def dollars(self) -> float:
        return self.num_devices * self.price_per_hour * self.hours

    @property
    def least(self) -> float:
        """The lower end of the bar."""
        return self.dollars * max(1 - self.error, 0)

    @property
    def most(self) -> float:
        """The upper end of the bar: what a budget has to cover."""
        return self.dollars * (1 + self.error)

    @property
    def buffer(self) -> float | None:
        """Dollars left of the budget; negative where it does not suffice."""
        return None if self.budget is None else self.budget - self.dollars

    def __str__(self) -> str:
        """The sentence that is said before a launch too. Hours and price are rounded up, the budget down."""
        price = Decimal(repr(float(self.price_per_hour))).quantize(UNIT, ROUND_CEILING)
        budget = None if self.budget is None else Decimal(repr(float(self.budget))).quantize(UNIT, ROUND_FLOOR)
        text = sentence(price, self.num_devices, round_up(self.hours), budget, device=self.device)
        return text if not self.error else f"{text} With the bar {money_range(self.least, self.most)}."


CENTURY_HOURS = 100 * 365.25 * 24


def duration(hours: float) -> str:
    """Hours in words, rounded up."""
    if hours > CENTURY_HOURS:
        return "more than a century"
    if hours < 1:
        exact = hours * (1 - 1e-12)
        return f"{math.ceil(exact * 60)} min" if hours > 2 / 60 else f"{math.ceil(exact * 3600)} s"
    return f"{_up(hours)} h" + (f" ({_up(hours / 24)} days)" if hours >= 48 else "")


def _up(number: float) -> str:
    """With one digit after the point."""
    return f"{math.ceil(number * 10 * (1 - 1e-12)) / 10:,.1f}"
