"""Commands that change the engines and nodes of a fleet over a control port."""
