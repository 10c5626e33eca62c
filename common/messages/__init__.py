"""The vocabulary that travels between processes: frozen, tagged messages and the ids that name things."""
