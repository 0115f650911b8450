"""autopar inside of other libraries' training loops; each file needs its library, and nothing else imports it."""
