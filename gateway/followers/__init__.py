"""Several gateways over one state of the policies: one gives orders to the engines, the others follow it and pass calls on as it does."""
