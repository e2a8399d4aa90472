"""The report for the browser: one HTML file of one run or of several side by side, which asks no host for anything."""
