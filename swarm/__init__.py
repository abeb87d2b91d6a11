"""Peers and bytes: identity, directory, links, views, agreement, rounds, chunks, simulator. Knows no tensor."""
