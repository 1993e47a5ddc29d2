"""The process `jobs`: offline jobs of many items, each answered exactly once."""
