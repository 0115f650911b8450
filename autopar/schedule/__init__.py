"""Pipeline schedules as plain data: made by name, checked, played, held against closed forms, drawn."""

from .actions import Action, Schedule
from .catalogue import KINDS, make, register_schedule
from .files import save
from .overlay import overlay
from .play import check, play
from .played import Played

__all__ = ["KINDS", "Action", "Played", "Schedule", "check", "make", "overlay", "play", "register_schedule", "save"]
