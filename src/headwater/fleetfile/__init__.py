"""The file that describes a fleet that is really run: nodes, instances, Conductor, tenants."""
