"""How soon each contestant reaches a held-out score: who they are, their trainings, the scores afterwards."""
