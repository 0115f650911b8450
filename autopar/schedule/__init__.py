"""Pipeline schedules as plain data: made by name, checked, played, held against closed forms, drawn."""

from .actions import Action, Schedule
from .beside import beside
from .catalogue import KINDS, make, register_schedule
from .files import save
from .play import check, play
from .played import Played

__all__ = ["KINDS", "Action", "Played", "Schedule", "beside", "check", "make", "play", "register_schedule", "save"]
