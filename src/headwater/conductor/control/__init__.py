"""What operators and other gateways ask: served by the parent, which asks the workers over Unix sockets."""
