"""What a chart shows, as plain values: made from metrics, drawn by the report and by plots alike."""
