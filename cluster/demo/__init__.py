"""`make up`: engines, nodes and the same chats under two policies, live."""
