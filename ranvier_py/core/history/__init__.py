"""What a node showed during the last quarter of an hour, in fixed memory."""
