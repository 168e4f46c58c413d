"""Membership: which nodes are in the cluster and alive; `members` composes the parts."""
