"""What a router and a worker both need to be a process among others. Knows neither of them."""
