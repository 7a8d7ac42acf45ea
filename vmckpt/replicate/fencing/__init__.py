"""Making sure that an old primary can act no more: agents, and who calls them."""
