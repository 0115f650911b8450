"""Pipeline schedules as plain data: made by name, checked, played, measured against closed forms, drawn."""
