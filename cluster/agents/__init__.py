"""The requests of real agents: shapes that replay them, and which engine held how much of each prompt when it came."""
