#!/bin/sh
# Screenshot of a page for the documentation: screenshot.sh PAGE.html PICTURE.png WIDTH HEIGHT [dark]
# Needs Chromium on the path. 390 is a phone's width.
set -eu
theme=1
[ "${5:-light}" = dark ] && theme=0
exec chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$(mktemp -d)" \
    --blink-settings=preferredColorScheme=$theme --window-size="$3,$4" --screenshot="$2" "file://$(realpath "$1")"
