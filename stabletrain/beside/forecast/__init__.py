"""Says ahead of time which monitored signal will reach its threshold, and how likely trouble is."""
