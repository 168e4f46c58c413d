"""`make up`: shows engines, nodes and the same chats under two policies, live."""
