"""What explains an incident, once there is one; nothing here runs before."""
