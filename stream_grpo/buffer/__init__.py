"""The durable buffer: journal, ledger, tickets, leases."""
