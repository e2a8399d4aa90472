"""Chart data as plain values, computed from metrics and drawn by HTML reports and plots."""
