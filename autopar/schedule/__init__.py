"""Pipeline schedules as plain data: made by name, checked, played, held against closed forms, drawn."""

from .actions import Action, Schedule
from .catalogue import KINDS, make
from .play import check, play
from .played import Played

__all__ = ["KINDS", "Action", "Played", "Schedule", "check", "make", "play"]
