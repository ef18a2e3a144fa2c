"""The data of the studies: ten tables that come with the package, and readers of the image sets' official files.

Nothing is downloaded and nothing unpickled. Every file is checked by SHA-256 before a byte of it is used.
"""

from expacc.datasets.images import IMAGES, ImageSet, load_images
from expacc.datasets.tables import TABLES, Table, load_table

__all__ = ["IMAGES", "TABLES", "ImageSet", "Table", "load_images", "load_table"]
