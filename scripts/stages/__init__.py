"""What `bench_stages` measures: each stage against its bound, in processes like its own."""
