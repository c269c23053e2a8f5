"""The connector SDK: layouts, plans, keys, the transfer protocol, transports and stores."""
