"""Who is in the cluster and alive; `members` composes the rest."""
