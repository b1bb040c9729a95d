"""The plan as one HTML page."""


def page(record: dict) -> str:
    return ""
