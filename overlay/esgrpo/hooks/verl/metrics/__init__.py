"""What a run tells of itself: verl's Tracking, and records."""
